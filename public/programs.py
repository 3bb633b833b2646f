"""Entry points of the programs. Ctrl-C ends them quietly from here on, while their modules are still loaded."""

import sys
from importlib import import_module


def molink() -> None:
    """Runs `molink`."""
    _run("molink.client.commands.cli")


def molink_peer() -> None:
    """Runs `molink-peer`."""
    _run("molink.peer.commands.cli")


def molink_gateway() -> None:
    """Runs `molink-gateway`."""
    _run("molink.client.gateway.cli")


def molink_simnet() -> None:
    """Runs `molink-simnet`."""
    _run("molink.simnet.cli")


def _run(module: str) -> None:
    try:
        main = import_module(module).main
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell says of a program that SIGINT has ended
    main()
