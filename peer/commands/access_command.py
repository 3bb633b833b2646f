"""The command line of `molink-peer access`; what it does is in `access.py`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from molink import commands
from molink.commands import example, option, with_logging


def add_access(
    app: typer.Typer,
    serve: Callable[[Mapping[str, object]], None],
    folder_of: Callable[[Path | None], Path],
) -> None:
    """Adds the command. `serve` does what `join` does, with these options; `folder_of` finds the state directory."""

    @app.command(
        epilog=example("molink-peer access --gateway https://swarm.example.org --token sk-molink-...")
    )
    @with_logging
    def access(  # noqa: PLR0913 - options, by name
        gateway: Annotated[str, typer.Option(metavar="URL", help="The gateway to register with.")],
        token: Annotated[
            str,
            typer.Option(
                metavar="TOKEN",
                envvar="MOLINK_ACCESS_TOKEN",
                help="What its operator gave for this machine; better in the environment, where process lists do "
                "not show it.",
            ),
        ],
        model: Annotated[str | None, option("model")] = None,
        memory: Annotated[str | None, option("memory")] = None,
        device: Annotated[str | None, option("device")] = None,
        layers: Annotated[str | None, option("layers")] = None,
        name: Annotated[str | None, option("name")] = None,
        region: Annotated[str | None, option("region")] = None,
        state_dir: commands.StateFolder = None,
    ) -> None:
        """Register this machine with a gateway's operator, and serve.

        Tells the gateway what this machine is, is told which swarm to join and whose orders to take, and serves until
        the operator has it exit, or Ctrl-C. Needs outgoing connections only. Other settings of `join` come from the
        environment and the configuration file.
        """
        own = {
            "model": model,
            "memory": memory,
            "device": device,
            "layers": layers,
            "name": name,
            "region": region,
            "state_dir": state_dir,
        }
        from molink.peer.commands.access import keep_swarm_key, register

        folder = folder_of(state_dir)
        granted = register(gateway, token, folder / "identity.key")
        own["model"] = model or granted.model
        told = {
            "initial_peers": list(granted.initial_peers),
            "operator": [granted.operator],
            "swarm_key": keep_swarm_key(granted, folder),
        }
        print(f"Registered with {gateway}: this machine takes the orders of {granted.operator}", flush=True)
        serve({option: value for option, value in (own | told).items() if value is not None})
