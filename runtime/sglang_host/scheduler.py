"""Fathom's scheduler: SGLang's, with our worker, our reports, and an honest account of what is running."""

import os
from typing import Any

import sglang
from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.platforms import current_platform

from fathom.runtime.sglang_host import seams
from fathom.runtime.sglang_host.streamer import FathomOutputStreamer
from fathom.runtime.sglang_host.worker import FathomWorker


def _name(obj: object) -> str:
    cls = type(obj)
    return f"{cls.__module__}.{cls.__qualname__}"


class FathomScheduler(Scheduler):
    """SGLang's scheduler, event loop and all, running :class:`FathomWorker`."""

    def init_tp_model_worker(self) -> None:
        self.tp_worker = FathomWorker(
            server_args=self.server_args, gpu_id=self.ps.gpu_id, ps=self.ps, nccl_port=self.nccl_port
        )

    def get_output_streamer_class(self) -> type[FathomOutputStreamer]:
        return FathomOutputStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        self.output_streamer.ledger = self.tp_worker.ledger

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"fathom": self.fathom_state()}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state["fathom"] = self.fathom_state()
        return output

    def fathom_state(self) -> dict[str, Any]:
        """What this process runs, told by its own objects (JSON-safe)."""
        runner = self.tp_worker.model_runner
        pool = runner.token_to_kv_pool
        return {
            "pid": os.getpid(),
            "scheduler": _name(self),
            "worker": _name(self.tp_worker),
            "attention_backend": _name(runner.attn_backend),
            "output_streamer": _name(self.output_streamer),
            "platform": _name(current_platform),
            "sglang": sglang.__version__,
            "seams": len(seams.rows("scheduler")),
            "kv_pool": {
                "tokens": pool.size,
                "page_size": pool.page_size,
                "layers": pool.layer_num,
                "free": self.token_to_kv_pool_allocator.available_size(),
                "cached": self.tree_cache.evictable_size(),
                "held": self.tree_cache.protected_size(),
                "bytes_per_token": self.tp_worker.ledger.kv_shape.bytes_per_token,
            },
            "steps": dict(self.tp_worker.ledger.totals),
            "open_accounts": len(self.tp_worker.ledger),
        }
