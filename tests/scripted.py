"""A script in a fork of the process that has imported what a server imports."""


def main(argv):
    exec(compile(argv[0], "script", "exec"), {"__name__": "__main__"})
