"""``nominal_gpu.py`` where SGLang lets FlashInfer tune its kernels at start: by forwards of made-up requests.

It does so for experts on Blackwell, and for some 8-bit weights.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import nominal_gpu  # noqa: F401  first: it makes the device
from sglang.srt.environ import envs
from sglang.srt.model_executor.runner import base_runner, flashinfer_autotune

from fathom.server.cli import main


def forward_only(runner, forward, **_):
    forward()
    print(f"made-up requests of the {'draft' if runner.is_draft_worker else 'target'}", flush=True)


base_runner.should_run_flashinfer_autotune = lambda runner: True
for module in (base_runner, flashinfer_autotune):
    module.run_flashinfer_autotune_forward = forward_only
envs.SGLANG_FLASHINFER_AUTOTUNE_EXTEND.set(True)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
