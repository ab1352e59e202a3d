"""``fathom`` with overlap scheduling on a CPU, where it is off: steps begin before the last result is known."""

import sys

from fathom.runtime.sglang_host import engine_args
from fathom.server.cli import main

if __name__ == "__main__":
    del engine_args.CPU_FLAGS["--disable-overlap-schedule"]
    sys.exit(main(sys.argv[1:]))
