"""`molink-simnet swarm`: the whole product at scale, in virtual time."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging
from molink.progress import Progress
from molink.simnet.core.matrices import bundled_matrix, read_matrix
from molink.simnet.core.traces import TraceRequest, bundled_trace, read_trace
from molink.simnet.devices.model_shapes import ModelShape, shape_named
from molink.simnet.presentation.options import (
    LatencyMatrix,
    Output,
    Trace,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.results import Findings, deliver, output_folder
from molink.simnet.swarm import options
from molink.simnet.swarm.figures import Series, draw_swarm
from molink.simnet.swarm.population.snapshot_file import read_snapshot
from molink.simnet.swarm.report import SwarmRow, swarm_row, swarm_series
from molink.simnet.swarm.settings import HOUR_S, Churn, SwarmSettings
from molink.simnet.swarm.table import swarm_table

if TYPE_CHECKING:
    from molink.simnet.swarm.world import Cast

EXAMPLE = "molink-simnet swarm --peers 1000 --hours 0.25 --output results"


def swarm(
    peers: options.Peers = 10_000,
    hours: options.Hours = 1.0,
    gateways: options.Gateways = 4,
    rate: options.Rate = 1.0,
    churn: options.ChurnHours = 2.0,
    crash_share: options.CrashShare = 0.2,
    model: options.Model = "llama-2-70b",
    from_snapshot: options.FromSnapshot = None,
    without: options.Without = None,
    bandwidth_factor: options.BandwidthFactor = None,
    latency_matrix: LatencyMatrix = None,
    trace: Trace = None,
    partner: options.Partner = "off",
    seed: options.Seed = 0,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Run a whole swarm in virtual time.

    Volunteers with the cards that people have at home come, choose layers, serve and go; gateways plan circuits for
    requests, lease them, and plan anew when a peer goes away. Placement, moves to other layers, planning, leases,
    avoidance, announcements and their intervals are the product's own. Shows what clients get, and what the control
    plane takes.
    """
    start_logging(verbose=verbose, debug=debug)
    # a client's hosts and channels, which take a second to load
    from molink.simnet.swarm.factory import drawn_cast

    try:
        require_positive("--hours", hours)
        require_positive("--rate", rate)
        require_not_negative("--churn", churn)
        stays = Churn(churn * HOUR_S, crash_share) if churn else Churn(crash_share=crash_share)
        if partner not in ("auto", "off"):
            raise ValueError(f"--partner is auto or off, not {partner}")
        settings = SwarmSettings(
            peers, hours * HOUR_S, gateways, rate, stays, seed, partners=partner == "auto"
        )
        requests = bundled_trace() if trace is None else read_trace(trace)
        shape = shape_named(model)
        if from_snapshot is None:
            if without or bandwidth_factor is not None:
                raise ValueError("--without and --bandwidth-factor change a snapshot: give --from-snapshot")
            matrix = bundled_matrix() if latency_matrix is None else read_matrix(latency_matrix)
            casts = {"swarm": drawn_cast(settings, shape, matrix, requests)}
        else:
            casts = _what_if(settings, from_snapshot, shape, without or [], bandwidth_factor, requests)
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = output_folder(output)
    rows, series = _run_all(casts, settings)
    parameters: dict[str, object] = {
        "peers": peers if from_snapshot is None else len(casts["before"].volunteers),
        "hours": hours, "gateways": gateways, "rate_rps": rate, "churn_hours": churn, "crash_share": crash_share,
        "model": model, "from_snapshot": None if from_snapshot is None else str(from_snapshot),
        "without": without or [], "bandwidth_factor": bandwidth_factor,
        "latency_matrix": None if latency_matrix is None else str(latency_matrix),
        "trace": None if trace is None else str(trace), "partner": partner, "seed": seed,
    }  # fmt: skip
    found = Findings(
        "swarm",
        f"A swarm of {rows[0].peers:,} peers that serves {model}",
        parameters,
        [asdict(row) for row in rows],
        [swarm_table(rows)],
        more={"series": series},
    )
    deliver(found, as_json=as_json, folder=folder, draw=lambda where: draw_swarm(series, where))


def _what_if(
    settings: SwarmSettings,
    path: Path,
    shape: ModelShape,
    without: list[str],
    bandwidth_factor: float | None,
    requests: tuple[TraceRequest, ...],
) -> "dict[str, Cast]":
    """The snapshot's swarm as it is, and, if anything is to change, as it would be."""
    from molink.simnet.swarm.factory import live_cast

    live = read_snapshot(path, shape)
    casts = {"before": live_cast(settings, live, requests)}
    if without or bandwidth_factor is not None:
        changed = live
        for peer in without:
            changed = changed.without(peer)
        if not changed.volunteers:
            raise ValueError("--without leaves nobody")
        if bandwidth_factor is not None:
            require_positive("--bandwidth-factor", bandwidth_factor)
            changed = changed.with_bandwidth(bandwidth_factor)
        casts["after"] = live_cast(settings, changed, requests)
    return casts


def _run_all(casts: "dict[str, Cast]", settings: SwarmSettings) -> tuple[list[SwarmRow], dict[str, Series]]:
    from molink.simnet.swarm.world import SwarmWorld

    rows: list[SwarmRow] = []
    series: dict[str, Series] = {}
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
    return rows, series
