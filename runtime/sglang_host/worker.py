"""The tensor-parallel worker that owns the engine step."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult

from fathom.runtime import flow
from fathom.runtime.ledger import Account, KvShape, RequestLedger

POLICY_KEY = "fathom"  # in SamplingParams.custom_params


def policy_of(request: Req) -> dict[str, Any]:
    """The validated policy a request was admitted with; empty for SGLang's internal requests (warm-up, health)."""
    params = request.sampling_params.custom_params
    return dict(params.get(POLICY_KEY, {})) if isinstance(params, dict) else {}


class FathomWorker(TpModelWorker):
    """SGLang's worker with the step handed to ``runtime/flow.py``."""

    ledger: RequestLedger

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.ledger = RequestLedger(self._kv_shape())

    def forward_batch_generation(
        self, batch: ScheduleBatch | None, *args: Any, **kwargs: Any
    ) -> GenerationBatchResult:
        if batch is None:  # an inner forward of SGLang's own, not a scheduled step
            return super().forward_batch_generation(batch, *args, **kwargs)
        return flow.step(self, batch, **kwargs)

    # --- flow.StepHost ---

    def open_accounts(self, batch: ScheduleBatch) -> list[Account]:
        return [self.ledger.open(request, policy_of(request)) for request in batch.reqs]

    def forward(self, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        return super().forward_batch_generation(batch, **options)

    def close_accounts(self, batch: ScheduleBatch, accounts: list[Account]) -> None:
        extends = batch.extend_lens if batch.forward_mode.is_extend() else [0] * len(accounts)
        decoding = set(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else ()
        for request, account, tokens in zip(batch.reqs, accounts, extends, strict=True):
            held = request.kv.kv_allocated_len
            if batch.forward_mode.is_decode() or request in decoding:
                self.ledger.decoded(account, held)
            elif batch.forward_mode.is_extend():
                self.ledger.prefilled(account, tokens, held)

    def _kv_shape(self) -> KvShape:
        pool = self.model_runner.token_to_kv_pool
        total = int(sum(pool.get_kv_size_bytes()))
        return KvShape(pool.layer_num, total // (pool.size + pool.page_size))
