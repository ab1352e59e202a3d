"""What a run has compared, what ran, and what failed, with what reproduces it."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuzz.requests import Request
from fuzz.worlds import World

MECHANISMS = (
    *("SPEED", "SpecPrefill", "FastKV's selection", "KV retention", "SFI", "drafting"),
    *("retraction", "a found prefix", "a prompt in chunks", "dense fallback", "an adapter"),
)
TOTALS = (
    *("servers", "requests", "greedy answers compared", "greedy tokens compared", "accounts compared"),
    *("log-probabilities compared", "repeats compared", "chats compared", "refusals"),
)


class Report:
    """Of one run.

    Attributes:
        folder: where failures are written.
        options: of the command that repeats a world, beside its seed.
        counts: see ``MECHANISMS`` and ``TOTALS``, and whatever else was counted.
        failures: files of failures.
    """

    def __init__(self, folder: Path, options: str = "") -> None:
        self.folder, self.options = folder, options
        self.counts: Counter[str] = Counter()
        self.failures: list[Path] = []

    def failed(
        self,
        world: World,
        why: str,
        request: Request | None = None,
        answer: Any = None,
        expected: Any = None,
        **more: Any,
    ) -> None:
        """Say it, with the command that repeats it, and write down all of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = sum(path.name.startswith(f"{world.seed}-") for path in self.failures) + 1
        path = self.folder / f"{world.seed}-{number}.json"
        told = {
            "why": why,
            "command": self.command(world),
            "flags": world.flags,
            "env": world.env,
            "world": asdict(world),
            "request": request and asdict(request),
            "answer": answer,
            "expected": expected,
        }
        path.write_text(json.dumps(told | more, indent=1, default=repr))
        self.failures.append(path)
        asked = f", {request.kind} of {len(request.prompt)} tokens, {request.policy}" if request else ""
        shown = why if len(why) <= 300 else f"{why[:100]} ... {why[-200:]}"
        print(f"  FAILED {shown}{asked}\n    {path}\n    {self.command(world)}", flush=True)

    def world_line(self, world: World, before: Counter[str]) -> str:
        """What was done in a world since the counts before it."""
        done = self.counts - before
        failed = sum(path.name.startswith(f"{world.seed}-") for path in self.failures)
        told = f"{done['requests']} requests, {done['greedy tokens compared']} tokens compared"
        return f"{world.seed}: {world}: {told}" + (f", {failed} FAILED" if failed else "")

    def totals(self) -> str:
        """What was compared and which mechanisms ran; one that never did is named."""
        rest = sorted(self.counts.keys() - set(TOTALS) - set(MECHANISMS))
        lines = [f"{name}: {self.counts[name]:,}" for name in (*TOTALS, *rest)]
        lines.append("requests that each mechanism ran for:")
        lines += [f"  {name}: {self.counts[name]:,}" for name in MECHANISMS]
        if idle := self.idle():
            lines.append(f"NEVER RAN: {', '.join(idle)}")
        lines.append(f"failures: {len(self.failures)}")
        return "\n".join(lines)

    def idle(self) -> list[str]:
        """Mechanisms that no request used."""
        return [name for name in MECHANISMS if not self.counts[name]]

    def command(self, world: World) -> str:
        """What runs a world again."""
        return f'make fuzz ARGS="--seed {world.seed} --worlds 1{self.options}"'
