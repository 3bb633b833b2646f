"""How fast this machine is: one layer's decode step by batch size and prefill by tokens, what a longer context adds to
each, the model's ends, and loading.

Measured with real weights in the real engine, one layer of the model at a time, so that little memory is
enough for a large model. Remembered, because a volunteer restarts more often than hardware changes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from molink.peer.compute.backend import Backend, MeasuredDevice, MeasuredModel, StageEngine
from molink.peer.device.device import describe_device
from molink.peer.device.thread_choice import share_of_others, stays_the_best
from molink.peer.device.threads import processor_times
from molink.peer.profiling.layer_bench import MOST_LAYERS, SEVERAL_BYTES, on_bench
from molink.peer.profiling.profile import FLOOR_MS, Profile
from molink.peer.profiling.profile_json import from_json, to_json
from molink.peer.state_dir import read_json, remember_json
from molink.shards.batching.engine import Engine
from molink.shards.batching.ways import DecodingWay
from molink.shards.spec import ModelSpec, Span

PROFILE_BUDGET_S = 12.0
"""After this long nothing more is begun, and what is missing is extrapolated: slow machines too are ready soon."""
MEASURED = "steps apart from layers that no cache holds, 17 rows too, heads of recorded steps"
"""What is measured; profiles that were measured otherwise are not looked at."""
REMEMBERED = 32
"""Profiles kept in the cache, the newest."""

Progress = Callable[[str], None]


def cached_or_measured(
    model: MeasuredModel,
    cache: Path,
    progress: Progress | None = None,
    *,
    ranks: Backend | None = None,
    rank_count: int = 1,
    threads: Sequence[int] = (),
) -> Profile:
    """The profile that the file `cache` remembers for this model, device and software, else a new one.

    With `ranks`, what `rank_count` such devices do that share every layer. Torch computes with the fastest of `threads`
    afterwards; empty: with as many as now. Where there was a choice of them and other programs kept the processors
    busy, nothing is remembered: the next start measures again, and serving corrects all but the choice.
    """
    counts = threads or (torch.get_num_threads(),)
    key = "/".join(
        (
            model.spec.model_hash,
            describe_device(model.device).name,
            f"threads {' '.join(map(str, counts))}",
            f"torch {torch.__version__}",
            f"molink {version('molink')}, {MEASURED}",
            *([f"ranks {rank_count}"] if ranks else []),
            *(
                [model.way.name.lower()]
                if model.way is not DecodingWay.RECORDED and model.device != "cpu"
                else []
            ),
        )
    )
    known = read_json(cache)
    profile = from_json(known.pop(key, None))
    if profile is None:
        before = processor_times()
        profile = measure(model, progress, ranks, counts)
        others_share = share_of_others(before, processor_times())
        if not profile.steady:
            if progress is not None:
                progress("Steps were still getting faster: measured again at the next start")
        elif len(counts) == 1 or stays_the_best(others_share):
            newest = dict(list(known.items())[-(REMEMBERED - 1) :])
            remember_json(cache, {**newest, key: to_json(profile)}, "the next start measures again")
        elif progress is not None:
            progress(
                f"Other programs kept {others_share:.0%} of the processors busy: measured again at the next start"
            )
    torch.set_num_threads(profile.threads)
    return profile


def measure(
    model: MeasuredModel,
    progress: Progress | None = None,
    ranks: Backend | None = None,
    threads: Sequence[int] = (),
) -> Profile:
    """Loads single layers of the model onto its device, or onto all of `ranks`, and times decode steps.

    `progress` is told, in sentences, what is measured. Of `threads` the fastest count is used from then on. Blocks;
    takes about a second for a small model.

    Raises:
        WeightsError: the layers cannot be loaded.
    """
    say = progress or (lambda _: None)
    backend, spec = ranks or MeasuredDevice(model), model.spec
    counts = threads or (torch.get_num_threads(),)
    device = "cpu" if ranks else model.device  # what goes in and comes out of ranks is there
    deadline_s = time.perf_counter() + PROFILE_BUDGET_S
    middle = Span(spec.layers // 2, spec.layers // 2 + 1)
    if spec.layers == 2:
        middle = Span(0, 1)  # neither layer is without an end, and embedding a token costs less than the head
    first, last = Span(0, 1), Span(spec.layers - 1, spec.layers)
    say(f"Measuring layer {middle.start} of {spec.name} on {device}")
    with on_bench(backend, spec, device, middle, deadline_s, several_layers(spec, middle)) as bench:
        count = bench.use_fastest_threads(counts)
        latencies, step_ms = bench.layer_latencies()
        prefills = tuple(
            replace(one, layer_ms=max(FLOOR_MS, one.layer_ms - step_ms)) for one in bench.prefill_latencies()
        )
        # Before what a peer can do without: slices decide how prompts pause decode.
        slices = bench.slice_latencies()
        contexts_ms = bench.context_costs_ms()
        plain_ms = bench.step_times_ms(want_logits=False)
        rates = [bench.load_bytes_per_s]
        steady = bench.steady
        # The other layers take as long before anything is known of them.
        deadline_s = bench.deadline_s - bench.opened_s
    layer_ms = latencies[0].layer_ms
    embed_ms = FLOOR_MS
    if first != middle and time.perf_counter() < deadline_s:
        say(f"Measuring the embedding of {spec.name} on {device}")
        with on_bench(backend, spec, device, first, deadline_s) as bench:
            embedding_ms = added_ms(bench.step_times_ms(want_logits=False), plain_ms)
            embed_ms = min(embedding_ms, layer_ms)  # one row of a table is less than a layer
            rates.append(bench.load_bytes_per_s)
            steady &= bench.steady
            deadline_s = bench.deadline_s
    if time.perf_counter() < deadline_s:
        say(f"Measuring the head of {spec.name} on {device}")
        with on_bench(backend, spec, device, last, deadline_s) as bench:
            with_ms = bench.step_times_ms(want_logits=True)
            without_ms = (
                plain_ms
                if always_makes_logits(backend.engine, last)
                else bench.step_times_ms(want_logits=False)
            )
            head_ms = added_ms(with_ms, without_ms)
            rates.append(bench.load_bytes_per_s)
            steady &= bench.steady
    else:  # assumed: a decode step reads its weights once, whatever they are
        head_ms = max(FLOOR_MS, layer_ms * spec.head_bytes / spec.layer_bytes[middle.start])
    return Profile(
        latencies, embed_ms, head_ms, max(rates), prefills, *contexts_ms, slices, count, step_ms, steady
    )


def always_makes_logits(engine: StageEngine, last: Span) -> bool:
    """Whether steps through the last layer make logits that nobody wants: recorded ones do."""
    paged = engine.paged.get(last) if isinstance(engine, Engine) else None
    return paged is not None and paged.is_recorded


def several_layers(spec: ModelSpec, middle: Span) -> Span:
    """The layers around `middle`, both ends of the model left out, that are measured beside that layer alone; `middle`
    where there are no others."""
    fitting = SEVERAL_BYTES // max(1, spec.layer_bytes[middle.start])
    count = min(MOST_LAYERS, max(2, fitting))
    before = min(middle.start - 1, (count - 1) // 2)
    behind = min(spec.layers - 1 - middle.stop, count - 1 - before)
    return Span(middle.start - max(0, before), middle.stop + max(0, behind))


def decode_layer_ms(model: MeasuredModel) -> float:
    """What a decode step of one sequence takes through one layer, and nothing else.

    Raises:
        WeightsError: the layer cannot be loaded.
    """
    middle = model.spec.layers // 2
    deadline_s = time.perf_counter() + PROFILE_BUDGET_S
    span = Span(middle, middle + 1)
    with on_bench(MeasuredDevice(model), model.spec, model.device, span, deadline_s) as bench:
        return max(FLOOR_MS, statistics.median(bench.step_times_ms(want_logits=False)))


def added_ms(with_ms: Sequence[float], without_ms: Sequence[float]) -> float:
    """What an end of the model adds to a step, from the times of steps with it and without it.

    The fastest of each are compared: an end takes microseconds, and of two medians taken one after the other
    the difference would be what the machine did besides. At least FLOOR_MS.
    """
    return max(FLOOR_MS, min(with_ms) - min(without_ms))
