"""``fathom`` whose processes of one model compare what they did and hold when the engine is asked for its state.

With ``OVERLAP`` in the environment steps overlap too, as in ``overlapping.py``.
"""

import os
import random
import sys
import zlib
from collections import deque

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from torch import distributed

from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_tree import tree_of
from fathom.runtime.sglang_host.scheduler import FathomScheduler
from fathom.server import cli

OVERLAP = "FATHOM_TESTS_OVERLAP"
MOST = 500
"""Things done that are kept, to find the first that differs."""


class Compared:
    """What is put in the place of the scheduler's methods, with theirs behind it."""

    run, process, state = (
        FathomScheduler.run_batch,
        FathomScheduler.process_batch_result,
        FathomScheduler.get_internal_state,
    )

    def run_batch(self, batch, *args, **kwargs):
        rows = [(req.rid, req.kv.req_pool_idx) for req in batch.reqs]
        extends = batch.extend_lens if batch.forward_mode.is_extend() else ()
        note(self, batch.forward_mode.name, rows, batch.seq_lens_cpu.tolist(), extends)
        return Compared.run(self, batch, *args, **kwargs)

    def process_batch_result(self, batch, result):
        Compared.process(self, batch, result)
        note(self, "put out", *map(said, batch.reqs))

    def get_internal_state(self, asked):
        """SGLang's.

        Raises:
            AssertionError: where one of the processes differs from the first.
        """
        group = self.tp_cpu_group
        told = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(told, held(self), group=group)
        for rank, other in enumerate(told):
            if wrong := [name for name, value in told[0].items() if other[name] != value]:
                pairs = zip(told[0]["last"], other["last"], strict=False)
                begin = next((pair for pair in pairs if pair[0] != pair[1]), "nothing lately done")
                raise AssertionError(f"process {rank} differs from the first in {wrong}, since {begin}")
        return Compared.state(self, asked)


def note(scheduler, *done):
    """Remember what a process has done."""
    kept = vars(scheduler).setdefault("noted", deque(maxlen=MOST))
    kept.append(done)
    scheduler.all_noted = zlib.crc32(repr(done).encode(), vars(scheduler).get("all_noted", 0))


def said(request: Req):
    return request.rid, len(request.output_ids), request.output_ids[-4:], request.finished()


def held(scheduler):
    """What has to be equal in all processes, by name: checksums of much, and the last things done."""
    found = {
        "done": vars(scheduler).get("all_noted"),
        "waiting": [request.rid for request in scheduler.waiting_queue],
        "running": [said(request) for request in scheduler.running_batch.reqs],
        "sessions": list(scheduler.session_controller.sessions),
        "PyTorch's random numbers": checksum(torch.get_rng_state()),
        "Python's random numbers": checksum(random.getstate()),
        "NumPy's random numbers": checksum(np.random.get_state()[1]),
        "steps": dict(scheduler.tp_worker.ledger.totals),
        "rows": list(scheduler.req_to_token_pool.free_slots),
        "last": list(vars(scheduler).get("noted", ())),
    }
    for name in list(found["steps"]):
        if name.endswith("seconds"):
            del found["steps"][name]
    allocator = scheduler.token_to_kv_pool_allocator
    if isinstance(allocator, DepthAllocator):
        memory = allocator.memory
        found |= {
            "free pages": checksum(memory.pool.free_pages()),
            "backing": checksum(memory.shared.backing),
            "tables": checksum(memory.tables.all_pages()),
            "retained": checksum(memory.retained.all_pages()),
            "free slots": checksum(allocator.free_pages),
        }
    if (tree := tree_of(scheduler.tree_cache)) is not None:
        found["prefixes"] = checksum(list(nodes_of(tree.root_node)))
    if (side := scheduler.tp_worker.draft_side) is not None:
        found["evidence"] = side.evidence.stood, side.evidence.tried
    return found


def nodes_of(node):
    """Keys, slots, and who holds them, of all nodes; depth first."""
    yield str(node.key and node.key.token_ids), node.lock_ref, checksum(node.value)
    for name in sorted(node.children, key=repr):
        yield from nodes_of(node.children[name])


def checksum(values):
    if isinstance(values, torch.Tensor):
        values = values.cpu().numpy()
    return zlib.crc32(values.tobytes() if isinstance(values, np.ndarray) else repr(values).encode())


def main(argv):
    for name in ("run_batch", "process_batch_result", "get_internal_state"):
        setattr(FathomScheduler, name, getattr(Compared, name))
    if OVERLAP not in os.environ:
        return cli.main(argv)
    import overlapping  # beside this script

    return overlapping.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
