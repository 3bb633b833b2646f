"""`molink-simnet`: worlds that are made up, in which the product's own decisions run."""

import sys
from collections.abc import Sequence

import typer

from molink.commands import example, run_app
from molink.simnet.emulate import command as emulate_command
from molink.simnet.papers.communication import command as communication_command
from molink.simnet.papers.cost import command as cost_command
from molink.simnet.papers.redundancy import command as redundancy_command
from molink.simnet.papers.scheduling import command as schedule_command
from molink.simnet.serve import command as serve_command
from molink.simnet.swarm import command as swarm_command

app = typer.Typer(
    name="molink-simnet",
    epilog=example("molink-simnet schedule --testbed 1"),
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command(epilog=example(schedule_command.EXAMPLE))(schedule_command.schedule)
app.command(epilog=example(serve_command.EXAMPLE))(serve_command.serve)
app.command(epilog=example(redundancy_command.EXAMPLE))(redundancy_command.redundancy)
app.command(epilog=example(swarm_command.EXAMPLE))(swarm_command.swarm)
app.command(epilog=example(cost_command.EXAMPLE))(cost_command.cost)
app.command(epilog=example(communication_command.EXAMPLE))(communication_command.communication)
app.command("emulate", epilog=example(emulate_command.EXAMPLE))(emulate_command.emulate_serving)


@app.callback()
def simnet() -> None:
    """Simulate swarms with the product's own decisions."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-simnet`."""
    sys.exit(run_app(app, "molink-simnet", sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
