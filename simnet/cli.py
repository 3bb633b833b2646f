"""`molink-simnet`: worlds that are made up, in which the product's own decisions run."""

import sys
from collections.abc import Sequence

import typer

from molink import commands
from molink.commands import example, run_app
from molink.simnet.emulate import command as emulate
from molink.simnet.papers.communication import command as communication
from molink.simnet.papers.cost import command as cost
from molink.simnet.papers.redundancy import command as redundancy
from molink.simnet.papers.scheduling import command as schedule
from molink.simnet.presentation.experiments import add_experiment
from molink.simnet.serve import command as serve
from molink.simnet.swarm import command as swarm

app = typer.Typer(
    name="molink-simnet",
    epilog=example("molink-simnet schedule --testbed 1"),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
add_experiment(app, schedule.schedule, "schedule", schedule.EXAMPLE)
add_experiment(app, serve.serve, "serve", serve.EXAMPLE)
add_experiment(app, redundancy.redundancy, "redundancy", redundancy.EXAMPLE)
add_experiment(app, swarm.swarm, "swarm", swarm.EXAMPLE)
add_experiment(app, cost.cost, "cost", cost.EXAMPLE)
add_experiment(app, communication.communication, "communication", communication.EXAMPLE)
add_experiment(app, emulate.emulate_serving, "emulate", emulate.EXAMPLE)


@app.callback()
def simnet(_version: commands.Version = False) -> None:
    """Simulate swarms with the product's own decisions."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-simnet`."""
    sys.exit(run_app(app, "molink-simnet", sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
