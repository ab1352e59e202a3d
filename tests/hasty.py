"""``fathom`` that at its end waits a second for an engine that hangs and for clients, not ten to fifteen."""

import sys

from sglang.srt.managers import tokenizer_manager

from fathom.server import cli, drain


def main(argv):
    drain.ABORT_SECONDS = drain.CLOSE_SECONDS = 1.0
    tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS = 1
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
