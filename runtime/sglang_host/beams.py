"""Beam search with an account that says under which policy it ran."""

from typing import Any

from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.config import POLICY_KEY


class FathomBeams(BeamCoordinator):
    """SGLang's coordinator, which gives the request sampling parameters of its own: the policy stays in them."""

    def validate_and_init(self, req: Req, recv_req: Any) -> str | None:
        custom = req.sampling_params.custom_params
        refused = super().validate_and_init(req, recv_req)
        if isinstance(custom, dict) and POLICY_KEY in custom:
            run = custom[POLICY_KEY] | {"speculative": False}  # beams are never drafted for
            req.sampling_params.custom_params = custom | {POLICY_KEY: run}
        return refused


def rows_to_take(request: Req) -> int:
    """Rows of the engine's request table that a request takes when its prompt is computed: its own if it has none
    yet, and one for each further beam."""
    group = request.beam_group
    others = group.beam_width - 1 if group is not None and group.member_rows is None else 0
    return others + (not request.kv.holds_kv)
