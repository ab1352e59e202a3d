"""Run with FlashInfer's Python on the path: its own wrapper, all but the compiled module, plans and runs for us.

The module's place is taken at the border to C++: what it is given there is held against what the kernels read.
"""

import sys

import flashinfer
import torch
from flashinfer import prefill
from flashinfer_wrapper import Ragged, Wrapper, check

from fathom.runtime.sglang_host.attention import flashinfer_prefill

empty = torch.empty


class Module:
    """The compiled functions, with the arguments of ``csrc/batch_prefill.cu`` and ``batch_prefill_sm90.cu``."""

    def __init__(self, backend, *types):
        check(types[:4] == (torch.float16,) * 3 + (torch.int32,) and types[4:6] == (64, 64), "kernels")
        self.more = 4 if backend == "fa2" else 0
        self.calls = []

    def plan(self, floats, on_device, on_host, qo, kv, lengths, rows, batch, heads, kv_heads, page, *rest):
        graph, dim, value_dim, causal, window, *more = rest
        check(on_device.shape == on_host.shape == (8 << 20,), "integer workspaces")
        check(rows == qo[-1] and batch == len(qo) - 1 == len(lengths), "numbers")
        check((heads, kv_heads, page, graph, dim, value_dim, causal, window) == SETTINGS, "settings")
        check(len(more) == self.more, "arguments")
        check(
            all(x.dtype == torch.int32 and x.is_contiguous() for x in (qo, kv, lengths)), "int32 on the host"
        )
        self.lengths = lengths
        self.calls.append("plan")
        return [rows, batch]

    @staticmethod
    def options(q, k, v, scale):
        kinds = {"q_data_type": q.dtype, "kv_data_type": k.dtype}
        return {"head_dim_vo": v.shape[-1], "causal": True, "sm_scale": scale} | kinds

    def paged_run(self, floats, ints, plan, q, k, v, qo, kv, slots, last, out, lse, mask, layout, *rest):
        window, _, custom_mask, *_ = rest
        check(plan == [len(q), len(last)] and (lse, window, custom_mask) == (None, -1, None), "plan")
        check(mask == prefill.MaskMode.CAUSAL.value and layout == prefill.TensorLayout.NHD.value, "layout")
        check(k.shape[1] == v.shape[1] == 1, "pages of one token")
        behind = Wrapper(floats)
        behind.plan(
            *(qo, kv, slots, last, q.shape[1], k.shape[2], q.shape[2], k.shape[1]),
            **self.options(q, k, v, rest[9]),
            seq_lens=self.lengths,
        )
        behind.run(q, (k[:, 0], v[:, 0]), out=out)
        self.calls.append("run")

    def ragged_run(self, floats, ints, plan, q, k, v, qo, kv, out, lse, mask, layout, *rest):
        window, _, custom_mask, *_ = rest
        check(plan == [len(q), len(kv) - 1] and (lse, window, custom_mask) == (None, -1, None), "plan")
        check(mask == prefill.MaskMode.CAUSAL.value and layout == prefill.TensorLayout.NHD.value, "layout")
        check(torch.equal(kv.diff(), self.lengths), "lengths")
        behind = Ragged(floats)
        behind.plan(
            *(qo, kv, q.shape[1], k.shape[1], q.shape[2]),
            **self.options(q, k, v, rest[9]),
        )
        behind.run(q, k, v, out=out)
        self.calls.append("run")


SETTINGS = 8, 2, 1, False, 64, 64, True, -1


def main():
    print(flashinfer.__version__)
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)
    for backend in ("fa2", "fa3"):
        modules = []

        def module(*args, modules=modules):
            modules[:] = modules or [Module(*args)]
            return modules[0]

        prefill.get_batch_prefill_module = module
        prefill.determine_attention_backend = lambda *_, backend=backend, **__: backend
        shape = 2, 8, 2, 64, torch.float16, torch.device("cpu"), 132
        made = flashinfer_prefill.FlashInferPrefill(*shape, room=2000)
        difference = made.difference()
        check(difference < 0.005, f"results differ by {difference}")
        print(backend, *modules[0].calls)


if __name__ == "__main__":
    sys.exit(main())
