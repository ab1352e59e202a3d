"""``fathom`` with overlap scheduling on a CPU, where it is off: steps begin before the last result is known."""

import sys

from fathom.runtime.sglang_host import engine_args
from fathom.server import cli


def main(argv):
    del engine_args.CPU_FLAGS["--disable-overlap-schedule"]
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
