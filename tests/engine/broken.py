"""``fathom`` where something is not as it should be, in SGLang or in Fathom: the first argument breaks it."""

import sys

from fathom.server import cli


def main(argv):
    exec(argv[0])
    return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
