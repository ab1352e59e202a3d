"""Beam search with an account that says under which policy it ran, and that begins anew when it was taken back."""

from typing import Any

from sglang.srt.beam_search.beam_group import BeamGroup
from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.config import POLICY_KEY

_release_req = schedule_batch.release_req


class FathomBeams(BeamCoordinator):
    """SGLang's coordinator, which gives the request sampling parameters of its own: the policy stays in them."""

    def validate_and_init(self, req: Req, recv_req: Any) -> str | None:
        custom = req.sampling_params.custom_params
        refused = super().validate_and_init(req, recv_req)
        if isinstance(custom, dict) and POLICY_KEY in custom:
            run = custom[POLICY_KEY] | {"speculative": False}  # beams are never drafted for
            req.sampling_params.custom_params = custom | {POLICY_KEY: run}
        return refused

    def begin_anew(self, req: Req) -> None:
        """Let go of the rows of all beams but the first, and of what the beams have said."""
        group = req.beam_group
        self._free_member_rows(group)
        group.retired = True  # for the steps that still know it; the new one lives in its place
        req.beam_group = BeamGroup(
            beam_width=group.beam_width,
            length_penalty=group.length_penalty,
            stop_token_ids=group.stop_token_ids.tolist(),
            max_new_tokens=group.max_new_tokens,
            num_return=group.num_return,
            device=group.stop_token_ids.device,
        )
        req.beam_group.leader, req.beam_group.prompt_len = req, group.prompt_len
        del req.output_ids[:]


def install(stock: BeamCoordinator) -> None:
    """Make SGLang's coordinator ours, for this process's only scheduler."""
    stock.__class__ = FathomBeams

    def release_req(*, req: Req, **given: Any) -> bool:
        """SGLang's, which leaves the rows of beams to the one caller that ends the request."""
        if req.beam_group is not None and req.to_finish is None:
            stock.begin_anew(req)
        return _release_req(req=req, **given)

    schedule_batch.release_req = release_req


def rows_to_take(request: Req) -> int:
    """Rows of the engine's request table that a request takes when its prompt is computed: its own if it has none
    yet, and one for each further beam."""
    group = request.beam_group
    others = group.beam_width - 1 if group is not None and group.member_rows is None else 0
    return others + (not request.kv.holds_kv)
