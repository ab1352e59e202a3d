"""The prefix cache keeps only what the draft has read too.

A hit gives a request the KV of both models. Generated tokens that the draft has not read yet when a request ends
have none in its pool, and are freed instead of cached.
"""

from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import common

from fathom.runtime.sglang_host.draft.draft_side import DraftSide
from fathom.runtime.sglang_host.requests import uses_draft

_effective_kv_committed_len = Req.effective_kv_committed_len
_release_overallocated = common._release_overallocated_kv_indices


def install(side: DraftSide) -> None:
    """Put the functions in SGLang's places, for this process's only draft."""

    def effective_kv_committed_len(self: Req) -> int:
        committed = _effective_kv_committed_len(self)
        return min(committed, side.state(self).read) if uses_draft(self) else committed

    def release_overallocated(req: Req, start_p: int, end_p: int, tree_cache: Any) -> None:
        if not uses_draft(req):
            _release_overallocated(req, start_p, end_p, tree_cache)
            return
        size = tree_cache.token_to_kv_pool_allocator.page_size
        start = -(-start_p // size) * size
        if start < end_p:
            tree_cache.free_kv_row(req.kv, [(start, end_p)])

    Req.effective_kv_committed_len = effective_kv_committed_len
    common._release_overallocated_kv_indices = release_overallocated
