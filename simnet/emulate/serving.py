"""What `molink-simnet emulate` does with what it was told: runs, one after the other, and what makes them doubtful."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from molink.commands import CommandFailed, tell
from molink.peer.device.device import processor_count
from molink.peer.models.choosing import FIRST_MODEL
from molink.peer.models.model import ModelRequest, open_model
from molink.peer.wire.transmission.policies import POLICIES
from molink.progress import Progress
from molink.shards.checkpoint.catalog import CheckpointNotFound
from molink.shards.checkpoint.store import StoreError
from molink.shards.spec import ModelSpec
from molink.signals import run_loop
from molink.simnet.devices.model_shapes import QWEN2_7B, shape_named
from molink.simnet.devices.named_devices import device_named
from molink.simnet.emulate.processes.child_process import EmulationError
from molink.simnet.emulate.rows import differing, serving_rows
from molink.simnet.emulate.run import Emulation, EmulationCell, EmulationRun, emulate
from molink.simnet.presentation.options import (
    parse_micro_batches,
    parse_names,
    parse_numbers,
    parse_speculation,
)
from molink.simnet.presentation.results import result_document, write_json
from molink.simnet.serve.served_as import usual

BUSY = 0.8
"""Of a core, or of all: beyond that this machine, not what it emulates, may set the pace."""


def cells_of(
    policies: str,
    rates: str,
    peers: int,
    micro_batches: str | None,
    prefill_chunk: int | None,
    speculation: str,
) -> list[EmulationCell]:
    """Every policy at every rate, with each way to guess. Raises ValueError for a name or number that means nothing."""
    guessed = parse_speculation("--speculation", speculation)
    rule = None if micro_batches is None else _rule(micro_batches)
    cells: list[EmulationCell] = []
    for rate_rps in parse_numbers("--rate", rates):
        for name in parse_names("--policy", policies, POLICIES):
            as_usual = usual(name, peers)
            served_as = replace(
                as_usual,
                micro_batches=rule or as_usual.micro_batches,
                prefill_chunk_tokens=prefill_chunk or as_usual.prefill_chunk_tokens,
            )
            cells += [EmulationCell(name, rate_rps, replace(served_as, speculation=one)) for one in guessed]
    return cells


def _rule(text: str) -> str:
    found = parse_micro_batches("--micro-batches", text)
    if len(found) > 1:
        raise ValueError(f"--micro-batches is one rule or number, got {text!r}")
    return found[0]


def spec_of(
    compute: Literal["timed", "real"], model: str | None, device: str, tensors_per_boundary: int
) -> ModelSpec:
    """What is served: a shape where peers only take the time, else the model. Raises ValueError where there is none."""
    if compute == "timed":
        shape = shape_named(model or QWEN2_7B.name)
        device_named(device)
        return replace(shape, tensors_per_boundary=tensors_per_boundary).spec()
    if tensors_per_boundary != 1:
        raise ValueError("--tensors-per-boundary needs --compute timed: engines that compute send one")
    with tempfile.TemporaryDirectory(prefix="molink-emulate-") as folder:
        digests = Path(folder) / "digests"
        opened = open_model(ModelRequest(model or FIRST_MODEL), (), digests, lambda _: None)
        try:
            return run_loop(opened).spec
        except (CheckpointNotFound, StoreError, OSError) as error:
            raise ValueError(str(error)) from error


def all_runs(
    emulation: Emulation, cells: Sequence[EmulationCell], parameters: dict[str, object], folder: Path | None
) -> list[EmulationRun]:
    """One after the other: at the same time they would take each other's processors. What is done is written."""
    runs: list[EmulationRun] = []
    with Progress() as progress:
        for number, cell in enumerate(cells, start=1):
            what = f"run {number} of {len(cells)}, {cell.policy} at {cell.rate_rps:g} requests/s"
            progress.begin(what)

            def report(line: str, what: str = what) -> None:
                progress.report(f"{what}: {line}")

            try:
                runs.append(run_loop(emulate(emulation, cell, report)))
            except EmulationError as error:
                raise CommandFailed(str(error)) from error
            if folder is not None:
                document = result_document("emulate", parameters, serving_rows(emulation, runs))
                write_json(folder / "result.json", document)
    return runs


def judge(emulation: Emulation, runs: Sequence[EmulationRun]) -> None:
    """Says what makes the numbers doubtful; raises CommandFailed where tokens are not what they should be."""
    cores = processor_count()
    for run in runs:
        name = f"{run.cell.policy} at {run.cell.rate_rps:g} requests/s"
        parts = (*run.usage.processes, run.usage.driver, run.usage.lines)
        busiest, together = max(parts), sum(parts) / cores
        if busiest > BUSY or (emulation.device is not None and together > BUSY):
            tell(
                f"{name}: this machine was at its limit (the busiest process took {100 * busiest:.0f} % of a core, "
                f"all {100 * together:.0f} % of {cores}), so the times are this machine's too"
            )
        errors = [outcome.error for outcome in run.outcomes if outcome.error is not None]
        if errors:
            tell(f"{name}: {len(errors)} requests failed, the first because {errors[0]}")
    for run, requests in differing(runs):
        raise CommandFailed(
            f"{requests} requests got other tokens under {run.cell.policy} than under {runs[0].cell.policy}"
        )


def parameters_of(emulation: Emulation, cells: Sequence[EmulationCell], trace: str) -> dict[str, object]:
    """What it takes to run the same again."""
    return {
        "policies": {
            cell.policy: {
                "micro_batches": cell.served_as.micro_batches,
                "prefill_chunk_tokens": cell.served_as.prefill_chunk_tokens,
            }
            for cell in cells
        },
        "speculation": list(dict.fromkeys(cell.served_as.speculation for cell in cells)),
        "rates_rps": list(dict.fromkeys(cell.rate_rps for cell in cells)),
        "peers": emulation.peers,
        "spans": [[span.start, span.stop] for span in emulation.spans],
        "bandwidth_mbps": emulation.bandwidth_mbps,
        "delay_ms": emulation.delay_ms,
        "model": emulation.spec.name,
        "dtype": emulation.spec.dtype,
        "compute": "real" if emulation.device is None else "timed",
        "device": emulation.device,
        "tensors_per_boundary": emulation.tensors_per_boundary,
        "trace": trace,
        "trace_requests": len(emulation.trace),
        "warm_up_s": emulation.warm_up_s,
        "duration_s": emulation.duration_s,
        "seed": emulation.seed,
    }
