"""The log of requests: at the levels that are to be without prompts and answers, without their tokens too."""

import logging
from typing import Any

from sglang.srt.utils.request_logger import WHITELISTED_HEADERS, RequestLogger

from fathom.runtime.sglang_host.reports import log_lines
from fathom.server.requests import request_ids

WITHOUT_TEXT = 2
"""From this level on (``--log-requests-level``) SGLang logs prompts and answers."""

TOLD_BY = frozenset(
    {f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("token", "top", "token_ids")}
    | {"output_token_sampling_mask", "output_token_sampling_logprobs", "prompt_token_ids"}
    | {"hidden_states", "pooled_hidden_state", "routed_experts", "indexer_topk"}
)
"""What an output has, at its top or in ``meta_info``, that says which tokens its prompt and answer are of."""


class FathomRequestLogger(RequestLogger):
    """SGLang's leaves out members of an output at its top only; ``--export-metrics-to-file`` goes by it too."""

    def _compute_metadata(self) -> tuple[int | None, set[str] | None, set[str] | None]:
        longest, of_requests, of_outputs = super()._compute_metadata()
        if self.log_requests and self.log_requests_level < WITHOUT_TEXT:
            of_outputs = {*(of_outputs or ()), *TOLD_BY}
        return longest, of_requests, of_outputs

    def _setup_targets(self) -> list[logging.Logger]:
        targets = super()._setup_targets()
        form = log_lines.BARE if self.log_requests_format == "json" else log_lines.STAMPED
        log_lines.write_as(form, targets)
        return targets

    def log_finished_request(self, obj: Any, out: Any, request: Any = None) -> None:
        *_, left_out = self.metadata
        if left_out:
            told = {name: value for name, value in out["meta_info"].items() if name not in left_out}
            out = {**out, "meta_info": told}
        super().log_finished_request(obj, out, request)


def install() -> None:
    """Put our class in the place of SGLang's, and the name of each request into its lines."""
    from sglang.srt.managers import tokenizer_manager

    tokenizer_manager.RequestLogger = FathomRequestLogger
    WHITELISTED_HEADERS.append(request_ids.NAME.decode())
