"""A prompt between two chunks is taken back: for those who decode meanwhile, or for somebody more urgent.

It has said nothing yet, and is in no batch. SGLang would end the last of those who decode rather than take it back,
and lets nobody go before its last chunk who is not beside it.
"""

import logging
from typing import Any

from sglang.srt.beam_search.batch_tail import beam_retraction_order
from sglang.srt.managers import schedule_batch

logger = logging.getLogger(__name__)


def make_room(scheduler: Any, running: Any) -> None:
    """Where a decode step does not fit beside a prompt between two chunks, let that be one of those of whom SGLang
    takes some back.

    Args:
        scheduler: SGLang's, whose `chunked_req` it is; running: the batch that is to decode.
    """
    request = scheduler.chunked_req
    if request is None or not (places := _cannot_decode(running)):
        return
    if scheduler.take_last() and not (places := _cannot_decode(running)):
        return
    together = [*(running.reqs[i] for i in places), request]
    order = beam_retraction_order(running._get_decode_retraction_order(together), together)
    if len(places) > 1 and order[-1] != len(places):
        return
    ratio = scheduler.new_token_ratio_tracker
    ratio.current = max(ratio.current, ratio.estimate_new_token_ratio_after_retract(together[:-1]))
    logger.warning("KV cache pool is full. A prompt between two chunks is taken back.")
    take_back(scheduler, len(places))


def take_back(scheduler: Any, running: int) -> None:
    """Let the prompt between two chunks wait again, behind all others until they are put in order.

    What it has computed stays in the prefix cache, where there is one.

    Args:
        scheduler: as in :func:`make_room`; running: how many decode.
    """
    request = scheduler.chunked_req
    scheduler.take_last()  # which may be its chunk
    schedule_batch.release_req(
        req=request,
        remaing_req_count=running,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    scheduler.chunked_req = None
    if scheduler.metrics_reporter.enable_metrics:
        tokens = len(request.origin_input_ids), len(request.output_ids)
        scheduler.metrics_reporter.metrics_collector.increment_retracted_reqs(1, *tokens)
    scheduler._add_request_to_queue(request, is_retracted=True)


def _cannot_decode(running: Any) -> list[int]:
    """Places of those who go on decoding, if there is no room for their next step."""
    places = [place for place, req in enumerate(running.reqs) if not req.finished()]
    return [] if not places or running.check_decode_mem(places) else places
