"""`molink-simnet emulate`: real peer processes serve a trace of requests over shaped lines."""

from dataclasses import asdict

from molink.commands import EXIT_USAGE, CommandFailed, Debug, Json, Verbose, start_logging
from molink.simnet.core.request_load import MOST_NEW_TOKENS, MOST_PROMPT_TOKENS, LengthLimits, kept
from molink.simnet.core.traces import BUNDLED, bundled_trace, read_trace
from molink.simnet.emulate import options
from molink.simnet.presentation.options import (
    Output,
    Tensors,
    Trace,
    WarmUp,
    require_not_negative,
    require_positive,
)
from molink.simnet.presentation.results import Findings, deliver, output_folder

EXAMPLE = "molink-simnet emulate --peers 3 --bandwidth-mbps 100 --delay-ms 30 --rate 0.2,0.3 --output results"


def emulate_serving(
    peers: options.Peers = 3,
    bandwidth_mbps: options.Bandwidth = 100.0,
    delay_ms: options.Delay = 30.0,
    policy: options.Policy = options.COMPARED,
    micro_batches: options.MicroBatches = None,
    prefill_chunk: options.PrefillChunk = None,
    rate: options.Rate = "0.2,0.3",
    duration: options.Duration = 300.0,
    warm_up: WarmUp = 60.0,
    compute: options.ComputeOption = "timed",
    model: options.Model = None,
    device: options.Device = "rtx-4090",
    tensors_per_boundary: Tensors = 1,
    trace: Trace = None,
    max_prompt_tokens: options.MostPrompt = MOST_PROMPT_TOKENS,
    max_new_tokens: options.MostNew = MOST_NEW_TOKENS,
    seed: options.Seed = 0,
    output: Output = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Serve a trace on peer processes over shaped lines.

    Real peers, each a process of its own behind an uplink of its own, serve requests over one circuit of even spans,
    once for each policy and rate. A policy stands for a system: its peers send, circulate micro-batches and compute
    prompts as that system does (concurrent: vLLM, zeromq: Helix, paper: that paper's MoLink). Shows averages of time
    to first token (TTFT), time per output token (TPOT) and latency, beside those of the transmission paper (its Table
    2) where it prints them.
    """
    start_logging(verbose=verbose, debug=debug)
    # real peers and their engines take seconds to load, which other commands and their processes need not wait for
    from molink.simnet.emulate.figures import draw_serving
    from molink.simnet.emulate.rows import serving_rows
    from molink.simnet.emulate.run import Emulation
    from molink.simnet.emulate.serving import all_runs, cells_of, judge, parameters_of, spec_of
    from molink.simnet.emulate.table import serving_table, usage_table

    try:
        cells = cells_of(policy, rate, peers, micro_batches, prefill_chunk)
        require_positive("--bandwidth-mbps", bandwidth_mbps)
        require_not_negative("--delay-ms", delay_ms)
        require_positive("--duration", duration)
        require_not_negative("--warm-up", warm_up)
        spec = spec_of(compute, model, device, tensors_per_boundary)
        emulation = Emulation(
            spec=spec,
            device=device if compute == "timed" else None,
            tensors_per_boundary=tensors_per_boundary,
            peers=peers,
            bandwidth_mbps=bandwidth_mbps,
            delay_ms=delay_ms,
            trace=kept(
                bundled_trace() if trace is None else read_trace(trace),
                LengthLimits(max_prompt_tokens, max_new_tokens),
                spec,
            ),
            warm_up_s=warm_up,
            duration_s=duration,
            seed=seed,
        )
        _ = emulation.spans
    except ValueError as error:
        raise CommandFailed(str(error), EXIT_USAGE) from error
    folder = output_folder(output)
    parameters = parameters_of(emulation, cells, BUNDLED if trace is None else str(trace))
    runs = all_runs(emulation, cells, parameters, folder)
    rows = serving_rows(emulation, runs)
    found = Findings(
        "emulate",
        f"{spec.name} served by {peers} peer processes over shaped lines",
        parameters,
        [asdict(row) for row in rows],
        [serving_table(emulation, rows), usage_table(rows)],
    )
    deliver(found, as_json=as_json, folder=folder, draw=lambda where: [draw_serving(rows, where)])
    judge(emulation, runs)
