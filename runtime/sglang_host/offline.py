"""The engine without HTTP: SGLang's offline ``Engine``, with Fathom's scheduler or with its own.

A program that starts one must declare torchvision's operators when its main module is imported (see
``torchvision_ops``): spawned processes import it first.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import POLICY_KEY, Policy
from fathom.runtime.sglang_host import engine_args, imports, process
from fathom.runtime.sglang_host.options import EngineOptions

FLUSH_SECONDS = 30.0


@dataclass(frozen=True)
class Timed:
    """One generation. Times in seconds on one clock that starts when its batch is handed over.

    Attributes:
        outputs: when each output was there, and how many tokens there were by then.
        account: what the scheduler says was done for it; empty from stock SGLang.
    """

    outputs: Sequence[tuple[float, int]]
    account: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """When its first output was there."""
        return self.outputs[0][0]

    @property
    def last(self) -> float:
        """When its last output was there."""
        return self.outputs[-1][0]

    @property
    def tokens(self) -> int:
        """Output tokens."""
        return self.outputs[-1][1]

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first one."""
        return (self.last - self.first) / max(1, self.tokens - 1)

    def tokens_after(self, moment: float) -> int:
        """Output tokens that were not there yet."""
        return self.tokens - max((tokens for when, tokens in self.outputs if when <= moment), default=0)


class OfflineEngine:
    """A started engine; end it with :meth:`stop`.

    Args:
        flags: flags of ``sglang serve``, ``--model-path`` included.
        stock: run SGLang's own scheduler.
        options: of Fathom's scheduler.

    Raises:
        SeamError: when this SGLang is not as Fathom knows it, or another scheduler runs than was asked for.
    """

    def __init__(self, flags: Sequence[str], stock: bool, options: EngineOptions) -> None:
        with imports.uncollected():
            server_args = engine_args.build(list(flags), options.depth_span)
            from sglang.srt.entrypoints.engine import Engine

            from fathom.runtime.sglang_host import forking
            from fathom.runtime.sglang_host.seams import seams

            seams.verify("server")
        forking.install()

        class Ours(Engine):
            run_scheduler_process_func = staticmethod(partial(process.run_scheduler_process, options=options))
            run_detokenizer_process_func = staticmethod(process.run_detokenizer_process)

        self._engine = (Engine if stock else Ours)(server_args=server_args)
        self.report: dict[str, Any] = (
            self._engine._scheduler_init_result.scheduler_infos[0].get(POLICY_KEY) or {}
        )
        if not stock:
            seams.verify_scheduler_report(self.report)
        elif self.report:
            raise seams.SeamError("stock SGLang was asked for, and Fathom's scheduler runs")

    def run(self, prompts: Sequence[list[int]], output: int, policy: Policy | None = None) -> list[Timed]:
        """Generate greedily and exactly ``output`` tokens for each prompt, all handed over at once.

        Args:
            prompts: token ids.
            policy: of every request; None for requests that carry none, as stock SGLang knows them.
        """
        sampling: dict[str, Any] = {"max_new_tokens": output, "ignore_eos": True, "temperature": 0.0}
        key = None
        if policy is not None:
            sampling["custom_params"] = {POLICY_KEY: policy.to_wire()}
            key = cache_key(None, policy)
        return self._engine.loop.run_until_complete(self._all(prompts, sampling, key))

    async def _all(
        self, prompts: Sequence[list[int]], sampling: dict[str, Any], key: str | None
    ) -> list[Timed]:
        begin = time.perf_counter()
        return list(await asyncio.gather(*(self._one(prompt, sampling, key, begin) for prompt in prompts)))

    async def _one(self, prompt: list[int], sampling: dict[str, Any], key: str | None, begin: float) -> Timed:
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(input_ids=prompt, sampling_params=dict(sampling), stream=True, extra_key=key)
        outputs, meta = [], dict[str, Any]()
        async for answer in self._engine.tokenizer_manager.generate_request(asked, None):
            meta = answer["meta_info"]
            outputs.append((time.perf_counter() - begin, meta["completion_tokens"]))
        # SGLang's own manager gathers what each output reported: one account, at the end.
        account = (meta.get(POLICY_KEY) or [{}])[-1]
        return Timed(outputs, account)

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Within it PyTorch's profiler records what the scheduler computes; at its end the trace is in a folder."""
        kind = "GPU" if torch.cuda.is_available() else "CPU"
        told = {"with_stack": False, "record_shapes": False}
        self._engine.start_profile(output_dir=str(folder), activities=[kind], **told)
        try:
            yield
        finally:
            self._engine.stop_profile()

    def forget(self) -> None:
        """Empty the prefix cache.

        The scheduler lets go of a request a little after its last output is here: it is given time.

        Raises:
            RuntimeError: when it does not.
        """
        manager, loop = self._engine.tokenizer_manager, self._engine.loop
        if not loop.run_until_complete(manager.flush_cache(timeout_s=FLUSH_SECONDS)).success:
            raise RuntimeError(f"the prefix cache could not be emptied within {FLUSH_SECONDS} s")

    def stop(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
