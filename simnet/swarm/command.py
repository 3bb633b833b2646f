"""`molink-simnet swarm`: the whole product at scale, in virtual time."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from molink.commands import EXIT_USAGE, CommandFailed
from molink.progress import Progress
from molink.simnet.core.guessing import OFF, SimulatedSpeculation
from molink.simnet.core.matrices import RttMatrix, bundled_matrix, read_matrix
from molink.simnet.core.traces import TraceRequest, bundled_trace, read_trace
from molink.simnet.devices.model_shapes import MODEL_SHAPES, ModelShape, shape_named
from molink.simnet.presentation.experiments import Run
from molink.simnet.presentation.options import (
    LatencyMatrix,
    Trace,
    option,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.results import Findings
from molink.simnet.swarm.population.snapshot_file import read_snapshot
from molink.simnet.swarm.relay_report import RelayRow, relay_row, relay_table
from molink.simnet.swarm.report import SwarmRow, flat_rows, swarm_row, swarm_series
from molink.simnet.swarm.settings import HOUR_S, Churn, SwarmSettings
from molink.simnet.swarm.table import Minutes, swarm_figures, swarm_table

if TYPE_CHECKING:
    from molink.simnet.swarm.world import WorldSetup

MOST_PEERS = 10_000
EXAMPLE = "molink-simnet swarm --peers 1000 --hours 0.25 --output results"


def swarm(
    peers: Annotated[
        int, option(f"Volunteers, at most {MOST_PEERS:,}.", "N", least=1, most=MOST_PEERS)
    ] = 10_000,
    hours: Annotated[float, option("Virtual hours in which requests come.", "H")] = 1.0,
    rate: Annotated[float, option("Requests a second, of all gateways together.", "RPS")] = 1.0,
    churn: Annotated[
        float, option("Hours that a volunteer stays, on average; 0: nobody comes or goes.", "H")
    ] = 2.0,
    from_snapshot: Annotated[
        Path | None,
        option(
            "Instead of drawn volunteers: a swarm as `molink-peer status --json` prints it; layers are as large "
            "as those of --model.",
            "FILE",
        ),
    ] = None,
    gateways: Annotated[int, option("Gateways, which take requests in turns.", "G", least=1, most=1000)] = 4,
    crash_share: Annotated[float, option("The part of volunteers that goes without a word.", "PART")] = 0.2,
    model: Annotated[str, option(f"Which model: {', '.join(MODEL_SHAPES)}.", "NAME")] = "llama-2-70b",
    without: Annotated[list[str] | None, option("What if this peer of the snapshot leaves.", "PEER")] = None,
    bandwidth_factor: Annotated[
        float | None, option("What if every line of the snapshot carries so many times as much.", "F")
    ] = None,
    latency_matrix: LatencyMatrix = None,
    trace: Trace = None,
    partner: Annotated[
        str,
        option(
            "Whether another peer keeps a second copy of each hop's KV cache and takes its place when it is lost. "
            "Clients have it auto; off takes half as long to simulate.",
            "auto|off",
        ),
    ] = "off",
    undialable: Annotated[
        float,
        option(
            "The part of drawn volunteers that nobody can dial, as 0.9; the others relay for them, with a tenth of "
            "their uplink.",
            "PART",
        ),
    ] = 0.0,
    speculation: Annotated[
        str,
        option(
            "How many guessed tokens travel with a trip round a circuit: auto, as many as pay; draft, with a draft "
            "model at each head too; off; or always so many. Guesses are right as often as in recorded generations.",
            "auto|draft|off|K",
        ),
    ] = OFF,
    seed: Annotated[int, option("The same seed, the same swarm, the same numbers.", "S", least=0)] = 0,
) -> Run:
    """Run a whole swarm in virtual time.

    Volunteers with the cards that people have at home come, choose layers, serve and go; gateways plan circuits for
    requests, lease them, and plan anew when a peer goes away. Placement, moves to other layers, planning, leases,
    avoidance, announcements and their intervals are the product's own. Shows what clients get, and what the control
    plane takes.
    """
    require_positive("--hours", hours)
    require_positive("--rate", rate)
    require_not_negative("--churn", churn)
    stays = Churn(churn * HOUR_S, crash_share) if churn else Churn(crash_share=crash_share)
    if partner not in ("auto", "off"):
        raise ValueError(f"--partner is auto or off, not {partner}")
    settings = SwarmSettings(
        peers, hours * HOUR_S, gateways, rate, stays, seed, partners=partner == "auto", undialable=undialable,
        speculation=SimulatedSpeculation.named(speculation),
    )  # fmt: skip
    if undialable and from_snapshot is not None:
        raise ValueError("--undialable is for drawn volunteers, not with --from-snapshot")
    requests = bundled_trace() if trace is None else read_trace(trace)
    shape = shape_named(model)
    if from_snapshot is None:
        if without or bandwidth_factor is not None:
            raise ValueError("--without and --bandwidth-factor change a snapshot: give --from-snapshot")
        matrix = bundled_matrix() if latency_matrix is None else read_matrix(latency_matrix)
        casts = None  # drawn when it runs: ten thousand volunteers take a while
    else:
        casts = _what_if(settings, from_snapshot, shape, without or [], bandwidth_factor, requests)
    parameters: dict[str, object] = {
        "peers": peers if casts is None else len(casts["before"].volunteers),
        "hours": hours, "gateways": gateways, "rate_rps": rate, "churn_hours": churn, "crash_share": crash_share,
        "model": model, "from_snapshot": None if from_snapshot is None else str(from_snapshot),
        "without": without or [], "bandwidth_factor": bandwidth_factor,
        "latency_matrix": None if latency_matrix is None else str(latency_matrix),
        "trace": None if trace is None else str(trace), "partner": partner, "seed": seed,
    }  # fmt: skip
    if undialable:
        parameters["undialable"] = undialable
    if settings.speculation is not None:
        parameters["speculation"] = speculation

    def run(_: Path | None) -> Findings:
        drawn = casts or _drawn(settings, shape, matrix, requests)
        rows, series, relays = _run_all(drawn, settings)
        return Findings(
            "swarm",
            f"A swarm of {rows[0].peers:,} peers that serves {model}",
            parameters,
            flat_rows(rows),
            [swarm_table(rows), *([relay_table(relays)] if relays else [])],
            more={"series": series} | ({"relays": [asdict(row) for row in relays]} if relays else {}),
            figures=lambda: swarm_figures(series),
        )

    return run


def _drawn(
    settings: SwarmSettings, shape: ModelShape, matrix: RttMatrix, requests: tuple[TraceRequest, ...]
) -> "dict[str, WorldSetup]":
    """A swarm of volunteers. Raises CommandFailed where the model or the trace fits nothing."""
    # a client's hosts and channels, which take a second to load
    from molink.simnet.swarm.factory import random_setup

    try:
        return {"swarm": random_setup(settings, shape, matrix, requests)}
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error


def _what_if(
    settings: SwarmSettings,
    path: Path,
    shape: ModelShape,
    without: list[str],
    bandwidth_factor: float | None,
    requests: tuple[TraceRequest, ...],
) -> "dict[str, WorldSetup]":
    """The snapshot's swarm as it is, and, if anything is to change, as it would be."""
    from molink.simnet.swarm.factory import snapshot_setup

    live = read_snapshot(path, shape)
    casts = {"before": snapshot_setup(settings, live, requests)}
    if without or bandwidth_factor is not None:
        changed = live
        for peer in without:
            changed = changed.without(peer)
        if not changed.volunteers:
            raise ValueError("--without leaves nobody")
        if bandwidth_factor is not None:
            require_positive("--bandwidth-factor", bandwidth_factor)
            changed = changed.with_bandwidth(bandwidth_factor)
        casts["after"] = snapshot_setup(settings, changed, requests)
    return casts


def _run_all(
    casts: "dict[str, WorldSetup]", settings: SwarmSettings
) -> tuple[list[SwarmRow], dict[str, Minutes], list[RelayRow]]:
    from molink.simnet.swarm.world import SwarmWorld

    rows: list[SwarmRow] = []
    series: dict[str, Minutes] = {}
    relays: list[RelayRow] = []
    with Progress() as progress:
        progress.begin("the swarm comes together")
        for name, cast in casts.items():
            its = replace(
                settings,
                peers=len(cast.volunteers),
                churn=settings.churn if cast.recruit else Churn(),
            )
            world = SwarmWorld(cast, its, progress.report)
            world.run()
            rows.append(swarm_row(world, name))
            series[name] = swarm_series(world)
            relayed = relay_row(world, name)
            relays += [] if relayed is None else [relayed]
    return rows, series, relays
