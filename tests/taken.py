"""``fathom`` whose port is taken once it has been found free and the model is about to be loaded."""

import socket

from fathom.server import app, cli


def main(argv):
    launch = app.launch

    def launch_late(server_args, *args):
        with socket.create_server((server_args.host, server_args.port)):
            launch(server_args, *args)

    app.launch = launch_late
    return cli.main(argv)
