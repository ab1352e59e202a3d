"""The tensor-parallel worker that owns the engine step."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult

from fathom.runtime import flow
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.ledger import Account, Held, KvShape, RequestLedger
from fathom.runtime.plan import tokens_per_span
from fathom.runtime.sglang_host import kv_schedule
from fathom.runtime.sglang_host.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.kv_pool import DepthKvPool
from fathom.runtime.sglang_host.requests import policy_of, prompt_tokens
from fathom.runtime.sglang_host.spans import SpanForward


class FathomWorker(TpModelWorker):
    """SGLang's worker with the step handed to ``runtime/flow.py``."""

    ledger: RequestLedger

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        super().alloc_memory_pool(*args, **kwargs)
        self.ledger = RequestLedger(self._kv_shape())
        if isinstance(self.allocator, DepthAllocator):
            kv_schedule.install(self.allocator, self.model_runner.req_to_token_pool)

    @property
    def allocator(self) -> Any:
        """SGLang's token allocator; ours on a machine without a GPU."""
        return self.model_runner.token_to_kv_pool_allocator

    def get_worker_info(self) -> tuple[Any, ...]:
        info = list(super().get_worker_info())
        if isinstance(self.allocator, DepthAllocator):
            # A shallow prompt may be longer than the dense tokens that fit; each prompt is checked by its pages.
            longest = min(
                self.model_config.context_len, self.allocator.virtual_pages * self.allocator.page_size
            )
            info[4:6] = longest - 1, longest - 6
        return tuple(info)

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

    def narrows(self, batch: ScheduleBatch) -> bool:
        if not batch.forward_mode.is_extend() or not isinstance(self.allocator, DepthAllocator):
            return False
        return not all(self.allocator.plan_of(request).dense for request in batch.reqs)

    def climb(self, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        # SGLang's own step, from its input buffers to its sampler, around another forward of the model.
        model = self.model_runner.model
        model.forward = SpanForward(self.model_runner, batch, self.allocator)
        try:
            return super().forward_batch_generation(batch, **options)
        finally:
            del model.forward

    def close_accounts(self, batch: ScheduleBatch, accounts: list[Account]) -> None:
        extends = batch.extend_lens if batch.forward_mode.is_extend() else [0] * len(accounts)
        decoding = set(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else ()
        for request, account, tokens in zip(batch.reqs, accounts, extends, strict=True):
            held = self._held(request)
            if batch.forward_mode.is_decode() or request in decoding:
                self.ledger.decoded(account, held)
            elif batch.forward_mode.is_extend():
                self.ledger.prefilled(account, tokens, held)
                self._note_plan(request, account)

    def _note_plan(self, request: Req, account: Account) -> None:
        if not isinstance(self.allocator, DepthAllocator):
            return
        plan, prompt = self.allocator.plan_of(request), prompt_tokens(request)
        if not plan.dense and not plan.scored:
            per_span = tokens_per_span(plan, prompt)
            account.kept_tokens, account.deep_tokens = round(sum(per_span) / plan.spans), per_span[-1]

    def _held(self, request: Req) -> Held:
        page_size = self.model_runner.token_to_kv_pool.page_size
        dense = (
            pages_of(request.kv.kv_allocated_len, page_size)
            * page_size
            * self.ledger.kv_shape.bytes_per_token
        )
        if not isinstance(self.allocator, DepthAllocator):
            return Held(dense, dense)
        return Held(
            self.allocator.held_pages(request) * self.model_runner.token_to_kv_pool.bytes_per_page, dense
        )

    def _kv_shape(self) -> KvShape:
        pool = self.model_runner.token_to_kv_pool
        total = int(sum(pool.get_kv_size_bytes()))
        spans = pool.spans if isinstance(pool, DepthKvPool) else 1
        return KvShape(pool.layer_num, total * spans // (pool.size + pool.page_size))
