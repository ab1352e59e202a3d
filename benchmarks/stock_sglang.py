"""Stock SGLang's own server: `python -m fathom.benchmarks.stock_sglang --model-path … [SGLang's flags]`.

Without a GPU, SGLang imports only where torchvision's two operators are declared, in every process. It spawns
its scheduler and detokenizer, and a spawned process first re-imports the main module, so declaring them at
the import of this module reaches all of them. Nothing of Fathom's runtime is loaded besides the platform that
lets the engine start on a CPU (entry point `sglang.srt.platforms`).
"""

import os
import sys

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()


def main(argv: list[str]) -> None:
    """What `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
