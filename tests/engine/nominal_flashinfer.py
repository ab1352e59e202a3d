"""``nominal_gpu.py`` with FlashInfer for prefill: its place is taken by the wrapper's stand-in, here in float32."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import nominal_gpu  # noqa: F401, E402  first: it makes the device
import torch  # noqa: E402
from flashinfer_wrapper import Ragged, Wrapper  # noqa: E402

from fathom.runtime.sglang_host.attention import flashinfer_prefill  # noqa: E402
from fathom.server.cli import main  # noqa: E402


class InFloat32(Wrapper):
    dtypes, head_dims = (torch.float32,), (16, 32, 64)


class RaggedInFloat32(Ragged):
    dtypes, head_dims = InFloat32.dtypes, InFloat32.head_dims


def choose(runner, spans, device):
    kv_dtype, dtype, heads, kv_heads, head_dim, _ = flashinfer_prefill.layout_of(runner)
    shape = spans, heads, kv_heads, head_dim, dtype, device
    room = flashinfer_prefill._most_copied(runner)
    how = {"make": InFloat32, "make_ragged": RaggedInFloat32, "room": room, "kv_dtype": kv_dtype}
    return flashinfer_prefill.FlashInferPrefill(*shape, processors=1, **how), ""


flashinfer_prefill.choose = choose
flashinfer_prefill.FEW_ROWS = 0
flashinfer_prefill.ROWS_PER_COPY = flashinfer_prefill.ROWS_PER_WIDENED = 8

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
