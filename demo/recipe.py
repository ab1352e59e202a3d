"""The whole demo pair in one resumable command: `python -m fathom.demo.recipe --out DIR`.

Trains the draft, grows the target from the draft's third stage and trains it; from there one short run at a
lower rate finishes the target and another adapts it to SPEED. Exports all three to `--models`. `--scale 0.1`
runs a tenth of the steps (a check of the recipe, not a model).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import export, speed, train

DRAFT = "256x5:900,512x3:400,1024x2:300,2304x1:500"
TARGET = "1024x2:400,2304x1:600"
GROW_STAGE = 2
POLISH = "1024x2:110,2304x1:60"
ADAPT = "512x3:120,1024x2:180"


def scaled(stages: str, scale: float) -> str:
    """The same stages with `scale` times the steps."""
    parsed = train.Stage.parse(stages)
    return ",".join(f"{s.length}x{s.rows}:{max(1, round(s.steps * scale))}" for s in parsed)


def run(out: Path, models: Path, scale: float, threads: int) -> None:
    tokenizer = out / "tokenizer"
    common = ["--tokenizer", str(tokenizer), "--threads", str(threads)]
    draft, target = out / "draft", out / "target-base"
    polished, aware = out / "target", out / "target-speed"
    steps = [
        (train.main, ["draft", "--out", str(draft), "--stages", scaled(DRAFT, scale)]),
        (train.main, ["target", "--out", str(target), "--stages", scaled(TARGET, scale)]),
        (train.main, ["target", "--out", str(polished), "--stages", scaled(POLISH, scale), "--seed", "3"]),
        (speed.main, ["--out", str(aware), "--stages", scaled(ADAPT, scale)]),
    ]
    steps[1][1].extend(["--grow", str(draft / f"stage{GROW_STAGE}.pt")])
    start = ["--init", str(target / "checkpoint.pt")]
    steps[2][1].extend([*start, "--lr", "1.5e-3", "--decay", "0.85", "--warmup", "20"])
    steps[3][1].extend(start)
    for step, args in steps:
        step(args + common)
    for folder in (draft, polished, aware):
        export.main([str(folder / "checkpoint.pt"), str(models / folder.name), "--tokenizer", str(tokenizer)])


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="checkpoints, logs and the tokenizer")
    p.add_argument("--models", type=Path, default=export.MODELS, help="where to export")
    p.add_argument("--scale", type=float, default=1.0, help="share of the steps")
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args(argv)
    run(args.out, args.models, args.scale, args.threads)


if __name__ == "__main__":
    main()
