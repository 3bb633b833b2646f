"""A peer's ranks as real processes: the whole model's tokens, counted traffic, and clear ends."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from support.deadline import DEADLINE_S
from support.devices.rank_traffic import request_traffic, step_traffic
from support.models.hub_models import hub_side
from support.models.tiny_models import greedy_reference, load_reference, make_tiny_model

from molink.peer.compute.backend import Backend, DeviceBackend, StepResult
from molink.peer.models.model import LocalModel
from molink.peer.ranks.backend import RankedBackend
from molink.peer.ranks.processes import RanksLost
from molink.routing.parallelism.parallelism import Lengths
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint import store
from molink.shards.errors import LoadAbandoned, WeightsError
from molink.shards.kv.kv_cache import CacheFull
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import BrokenLogits, Sampled, sample
from molink.shards.sampling.token_history import TokenHistory
from molink.shards.spec import SamplingParams, Span

PROMPT = [5, 6, 7, 9, 11, 200, 3]
TOKENS = 24
WIRED_RANK = Path(__file__).parents[2] / "support" / "devices" / "wired_rank.py"
GREEDY = SampleRequest(SamplingParams(), 0, 0)


def open_local(folder: Path, quantization: str = "none") -> LocalModel:
    manifest = store.read_manifest(folder)
    return LocalModel(folder, manifest, store.describe(manifest, "float32", quantization))


def ignore(_done: int, _total: int) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    model: LocalModel
    backend: RankedBackend


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks on processors, which hold all layers of a model with experts but its last."""
    model = open_local(make_tiny_model("mixtral", tmp_path_factory.mktemp("ranks")))
    backend = RankedBackend(model, ("cpu", "cpu"))
    with backend.ranks:
        backend.load(Span(0, 4), ignore)()
        backend.load(Span(4, 6), ignore)()
        yield Running(model, backend)


def generate(running: Running, prompt: list[int], tokens: int) -> list[int]:
    return drawn_by(running.backend, running.model.spec.whole, prompt, tokens)


def drawn_by(backend: Backend, whole: Span, prompt: list[int], tokens: int) -> list[int]:
    engine = backend.engine
    cache = engine.new_cache(whole, len(prompt) + tokens)
    drawn: list[int] = []
    while len(drawn) < tokens:
        new = tuple(drawn[-1:] or prompt)
        drawn.append(drawn_greedily(engine.step(whole, [Rows(cache, len(new), new, logit_rows=1)], None)))
    return drawn


def drawn_greedily(result: StepResult) -> int:
    """Of one row."""
    (one,) = sample(result, [GREEDY]) if isinstance(result, torch.Tensor) else result
    assert isinstance(one, Sampled)
    return one.token_id


def test_two_rank_processes_generate_the_tokens_of_transformers(running: Running) -> None:
    assert generate(running, PROMPT, TOKENS) == greedy_reference(running.model.folder, PROMPT, TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_two_rank_processes_generate_the_tokens_of_the_quantized_whole(
    quantization: str, tmp_path: Path
) -> None:
    folder = make_tiny_model("llama", tmp_path, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    model = open_local(folder, quantization)
    whole, alone, ranked = model.spec.whole, DeviceBackend(model, "cpu"), RankedBackend(model, ("cpu", "cpu"))
    alone.load(whole, ignore)()
    with ranked.ranks:
        ranked.load(whole, ignore)()
        assert drawn_by(ranked, whole, PROMPT, TOKENS) == drawn_by(alone, whole, PROMPT, TOKENS)


def test_sessions_step_together_through_two_spans_as_alone(running: Running) -> None:
    engine, spec = running.backend.engine, running.model.spec
    first, second = Span(0, 3), Span(3, 6)
    prompts = [PROMPT, [1, 2, 3], [300]]
    heads = [engine.new_cache(first, 32) for _ in prompts]
    tails = [engine.new_cache(second, 32) for _ in prompts]
    rows = [Rows(cache, len(ids), tuple(ids), False) for cache, ids in zip(heads, prompts, strict=True)]
    hidden = engine.step(first, rows, None)
    assert isinstance(hidden, torch.Tensor)
    assert hidden.shape == (sum(map(len, prompts)), spec.hidden_size)
    request = SampleRequest(SamplingParams(logprobs=20), 0, 0)
    wanted = [Rows(cache, len(ids), None, 1, (request,)) for cache, ids in zip(tails, prompts, strict=True)]
    drawn = engine.step(second, wanted, hidden)
    reference = load_reference(running.model.folder)
    for ids, one in zip(prompts, drawn, strict=True):
        assert isinstance(one, Sampled)
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        top = expected.topk(20)
        assert [token for token, _ in one.top] == top.indices.tolist()
        assert [its for _, its in one.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_ranks_take_a_cap_on_their_memory_and_go_on(running: Running) -> None:
    ranks, asked = running.backend.ranks, []
    ask = ranks.ask
    ranks.ask = lambda what, order, *rest, **more: (
        asked.append((what, order)) or ask(what, order, *rest, **more)
    )  # type: ignore[method-assign, func-returns-value, assignment]
    try:
        running.backend.cap_memory(10**9)
    finally:
        ranks.ask = ask  # type: ignore[method-assign]
    share = -(-(10**9 + running.model.spec.embed_bytes) // 2)
    assert asked == [("cap", {"bytes": share})], "each has the embedding whole"
    assert generate(running, PROMPT, 2) == greedy_reference(running.model.folder, PROMPT, 2)


def test_nobody_wanting_logits_gets_none(running: Running) -> None:
    whole = running.model.spec.whole
    cache = running.backend.engine.new_cache(whole, 8)
    assert running.backend.engine.step(whole, [Rows(cache, 2, (1, 2), logit_rows=0)], None) == []
    assert cache.length == 2


DRAWS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, logprobs=logprobs, logit_bias=bias)
    for temperature, top_k, top_p, logprobs, bias in [
        (0.0, 0, 1.0, None, ()),
        (1.0, 0, 1.0, None, ()),
        (0.7, 40, 1.0, 3, ()),
        (1.3, 0, 0.9, 20, ((7, -100.0), (383, 4.5))),
        (2.0, 5, 0.3, None, ((0, 100.0),)),
    ]
]


HISTORY = TokenHistory(2)
HISTORY.extend([3, 4, 5, 5, 6])
CONSTRAINTS: dict[str, Any] = {
    "params": SamplingParams(
        temperature=0.9,
        min_p=0.01,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        repetition_penalty=1.3,
        logprobs=2,
    ),
    "seen": HISTORY.seen(),
    "left_out": (1, 2),
    "allowed": bytes([0b11111011] * 12),
}
"""All that can be asked of a draw beside."""


def test_ranks_draw_the_tokens_of_one_device_and_no_logits_leave_them(running: Running) -> None:
    """Whatever is asked for, and beside rows that ask for nothing; the same seeds and positions."""
    ranked, whole = running.backend.engine, running.model.spec.whole
    alone = Engine(running.model.spec, "cpu")
    alone.attach(running.model.load(whole, "cpu"))
    prompts = [[position + 3 * index for position in range(2 + index)] for index in range(len(DRAWS) + 1)]
    piped = running.backend.ranks.payload_bytes
    for seed in (0, 7, 2**64 - 1):
        requests = [SampleRequest(params, seed, 5 + at) for at, params in enumerate(DRAWS)]
        requests[1:3] = [replace(one, **CONSTRAINTS) for one in requests[1:3]]
        rows = [
            [
                Rows(cache, len(ids), tuple(ids), int(request is not None), (request,) if request else ())
                for ids, request in zip(prompts, [*requests, None], strict=True)
                for cache in [engine.new_cache(whole, 16)]
            ]
            for engine in (ranked, alone)
        ]
        expected = sample(alone.step(whole, rows[1], None), requests)
        for ours, theirs in zip(ranked.step(whole, rows[0], None), expected, strict=True):
            assert isinstance(ours, Sampled)
            assert ours.token_id == theirs.token_id
            assert ours.logprob == (
                None if theirs.logprob is None else pytest.approx(theirs.logprob, abs=1e-4)
            )
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert running.backend.ranks.payload_bytes == piped


def test_a_row_that_cannot_be_drawn_fails_alone(running: Running) -> None:
    engine, spec, span = running.backend.engine, running.model.spec, Span(3, 6)
    hidden = torch.randn(4, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    hidden[1] = float("nan")
    biased = SamplingParams(logit_bias=((spec.vocabulary_size, 1.0),))
    requests = [SampleRequest(params, 1, 2) for params in (DRAWS[1], DRAWS[1], biased, DRAWS[2])]
    rows = [Rows(engine.new_cache(span, 4), 1, None, 1, (request,)) for request in requests]
    first, broken, refused, last = engine.step(span, rows, hidden)
    assert isinstance(broken, BrokenLogits)
    assert broken.row == 1
    assert isinstance(refused, ValueError)
    assert "logit_bias names token" in str(refused)
    rows = [Rows(engine.new_cache(span, 4), 1, None, 1, (requests[at],)) for at in (0, 3)]
    for one, beside in zip(engine.step(span, rows, hidden[[0, 3]]), (first, last), strict=True):
        assert isinstance(one, Sampled)
        assert isinstance(beside, Sampled)
        assert one.token_id == beside.token_id


def test_what_a_request_moves_is_what_the_formula_says(running: Running) -> None:
    ranks, spec = running.backend.ranks, running.model.spec
    before, piped = ranks.ask("count", {}), ranks.payload_bytes
    generate(running, PROMPT, TOKENS)
    after = ranks.ask("count", {})
    traffic = request_traffic(spec, 2, Lengths(len(PROMPT), TOKENS))
    for (old, _), (new, _) in zip(before, after, strict=True):
        assert (
            new["bytes"] - old["bytes"] == traffic.reduced_bytes
        )  # of two ranks, payload and sent are equal
        assert new["reductions"] - old["reductions"] == 2 * spec.layers * TOKENS
    assert ranks.payload_bytes - piped == traffic.pipe_bytes


def test_what_a_step_through_some_layers_moves_is_what_the_formula_says(running: Running) -> None:
    ranks, spec, span = running.backend.ranks, running.model.spec, Span(1, 4)
    cache = running.backend.engine.new_cache(span, 16)
    before, piped = ranks.ask("count", {})[1][0]["bytes"], ranks.payload_bytes
    running.backend.engine.step(span, [Rows(cache, 9, None, False)], torch.ones(9, spec.hidden_size))
    traffic = step_traffic(spec, span, 2, 9)
    assert ranks.ask("count", {})[1][0]["bytes"] - before == traffic.reduced_bytes
    assert ranks.payload_bytes - piped == traffic.pipe_bytes


def test_a_session_goes_on_between_several_devices_and_one(running: Running) -> None:
    """Exported tokens are the bytes that one device would have, so that either may take over from the other."""
    ranked, whole = running.backend.engine, running.model.spec.whole
    alone = Engine(running.model.spec, "cpu")
    alone.attach(running.model.load(whole, "cpu"))
    expected = greedy_reference(running.model.folder, PROMPT, 3)
    for source, target in ((ranked, alone), (alone, ranked), (ranked, ranked)):
        first, second = source.new_cache(whole, 32), target.new_cache(whole, 32)
        source.step(whole, [Rows(first, len(PROMPT), tuple(PROMPT), logit_rows=0)], None)
        exported = first.export(0, 4) + first.export(4, len(PROMPT))
        size = len(exported) * 4 // len(PROMPT)
        second.restore(0, 4, exported[:size])
        second.restore(4, len(PROMPT) - 4, memoryview(exported)[size:])
        assert second.length == len(PROMPT)
        drawn = list(expected[:1])
        while len(drawn) < len(expected):
            result = target.step(whole, [Rows(second, 1, (drawn[-1],), logit_rows=1)], None)
            drawn.append(drawn_greedily(result))
        assert drawn == expected
        second.truncate(4)
        assert second.export(0, 4) == exported[:size]


def test_exports_that_do_not_fit_are_refused_and_change_nothing(running: Running) -> None:
    engine, whole = running.backend.engine, running.model.spec.whole
    cache, other = engine.new_cache(whole, 32), engine.new_cache(whole, 4)
    engine.step(whole, [Rows(cache, 5, (1, 2, 3, 4, 5), logit_rows=0)], None)
    exported = cache.export(0, 5)
    with pytest.raises(ValueError, match="cannot export"):
        cache.export(0, 6)
    with pytest.raises(CacheFull):
        other.restore(0, 5, exported)
    with pytest.raises(ValueError, match="bytes are not the"):
        other.restore(0, 4, exported)
    with pytest.raises(ValueError, match="position 1"):
        other.restore(1, 3, exported[: len(exported) * 3 // 5])
    assert (cache.length, other.length) == (5, 0)
    assert cache.export(0, 5) == exported


def test_refusals_of_the_engine_leave_the_ranks_in_step(running: Running) -> None:
    engine, whole = running.backend.engine, running.model.spec.whole
    cache = engine.new_cache(whole, 4)
    with pytest.raises(ValueError, match="token ids must be in"):
        engine.step(whole, [Rows(cache, 1, (100_000,), True)], None)
    with pytest.raises(ValueError, match="lease reserved 4"):
        engine.step(whole, [Rows(cache, 5, (1, 2, 3, 4, 5), True)], None)
    with pytest.raises(ValueError, match="has at most"):
        engine.new_cache(whole, 10**6)
    with pytest.raises(ValueError, match="overlaps"):
        running.backend.load(Span(0, 1), ignore)()
    assert generate(running, PROMPT, 4) == greedy_reference(running.model.folder, PROMPT, 4)


def test_caches_that_nobody_has_are_dropped_on_every_rank(running: Running) -> None:
    engine, whole = running.backend.engine, running.model.spec.whole
    kept = engine.new_cache(whole, 8)
    held = [header["caches"] for header, _ in running.backend.ranks.ask("count", {})]
    gone = engine.new_cache(whole, 8)
    del gone
    engine.step(whole, [Rows(kept, 1, (1,), logit_rows=0)], None)
    assert [header["caches"] for header, _ in running.backend.ranks.ask("count", {})] == held


def test_loading_tells_its_progress_and_layers_can_be_let_go(running: Running) -> None:
    engine, told = running.backend.engine, []
    engine.detach(Span(4, 6))
    with pytest.raises(ValueError, match="not loaded"):
        engine.new_cache(running.model.spec.whole, 4)
    running.backend.load(Span(4, 6), lambda done, total: told.append((done, total)))()
    assert told
    assert told[-1][0] == told[-1][1]
    assert generate(running, PROMPT, 4) == greedy_reference(running.model.folder, PROMPT, 4)


def test_a_load_that_nobody_wants_any_more_is_forgotten_by_every_rank_and_can_come_again(
    running: Running,
) -> None:
    def unwanted(_done: int, _total: int) -> None:
        raise LoadAbandoned("nobody wants them any more")

    running.backend.engine.detach(Span(4, 6))
    ranks = running.backend.ranks
    with patch.object(ranks, "ask", wraps=ranks.ask) as asked:
        with pytest.raises(LoadAbandoned):
            running.backend.load(Span(4, 6), unwanted)
        assert [call.args[0] for call in asked.call_args_list] == ["load", "forget"]
    running.backend.load(Span(4, 6), ignore)()
    assert generate(running, PROMPT, 4) == greedy_reference(running.model.folder, PROMPT, 4)


@pytest.mark.full
def test_a_rank_that_dies_is_one_clear_error_and_ends_the_others(tmp_path: Path) -> None:
    asyncio.run(lose_a_rank(tmp_path))


async def lose_a_rank(folder: Path) -> None:
    model = open_local(make_tiny_model("qwen2", folder, num_hidden_layers=2))
    async with asyncio.timeout(DEADLINE_S), RankedBackend(model, ("cpu", "cpu")) as backend:
        backend.load(model.spec.whole, ignore)()
        expected = greedy_reference(model.folder, PROMPT, TOKENS)
        assert generate(Running(model, backend), PROMPT, TOKENS) == expected
        cache = backend.engine.new_cache(model.spec.whole, 8)
        watching = asyncio.create_task(backend.watch())
        children = psutil.Process().children()
        second = psutil.Process(backend.ranks.pids[1])
        second.kill()
        with pytest.raises(RanksLost, match="rank 1 on cpu ended with code"):
            await watching
        with pytest.raises(RanksLost, match="rank 1 on cpu ended with code"):
            await asyncio.to_thread(
                backend.engine.step, model.spec.whole, [Rows(cache, 1, (1,), logit_rows=1)], None
            )
        with pytest.raises(RanksLost):
            backend.load(Span(0, 1), ignore)
        gone, alive = psutil.wait_procs(
            [child for child in children if child.pid in backend.ranks.pids], timeout=DEADLINE_S
        )
        assert len(gone) == 2
        assert not alive


@pytest.mark.full
def test_a_model_that_two_ranks_cannot_share_is_refused_with_a_sentence(tmp_path: Path) -> None:
    model = open_local(make_tiny_model("llama", tmp_path, num_key_value_heads=1, num_hidden_layers=2))
    backend = RankedBackend(model, ("cpu", "cpu"))
    with backend.ranks, pytest.raises(WeightsError, match="its 1 key-value heads cannot be divided by 2"):
        backend.load(model.spec.whole, ignore)


@pytest.mark.full
def test_ranks_end_with_a_peer_that_is_killed(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, num_hidden_layers=2)
    program = (
        "import sys; from pathlib import Path; from molink.peer.models.model import LocalModel;"
        "from molink.peer.ranks.backend import RankedBackend; from molink.shards.checkpoint import store;"
        "folder = Path(sys.argv[1]); manifest = store.read_manifest(folder);"
        "backend = RankedBackend(LocalModel(folder, manifest, store.describe(manifest)), ('cpu', 'cpu'));"
        "backend.ranks.__enter__(); print(*backend.ranks.pids, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in peer.stdout.readline().split()]
        assert len(ranks) == 2
        peer.kill()
    _, alive = psutil.wait_procs(ranks, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_two_gloo_processes_put_on_the_wire_what_the_formula_says(architecture: str, tmp_path: Path) -> None:
    """Within 1 %, gloo's own framing included where the system counts what sockets receive."""
    folder = make_tiny_model(architecture, tmp_path)
    prompt = [(7 * position) % 384 for position in range(900)]
    tokens, ranks = 2, 2
    given = {"folder": str(folder), "rendezvous": str(tmp_path / "rendezvous"), "ranks": ranks}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                str(WIRED_RANK),
                json.dumps({**given, "rank": rank, "prompt": prompt, "tokens": tokens}),
            ],
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    told = [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]
    spec = store.describe(store.read_manifest(folder), "float32")
    predicted = request_traffic(spec, ranks, Lengths(len(prompt), tokens)).reduced_bytes
    for one in told:
        assert one["tokens"] == greedy_reference(folder, prompt, tokens)
        assert one["payload_bytes"] == predicted
        if one["wire_bytes"] is not None:
            assert one["wire_bytes"] == pytest.approx(predicted, rel=0.01)


@pytest.mark.full
def test_ranks_read_a_hubs_weights_from_the_store_and_are_measured_without_any(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("hub"))
    with hub_side(folder, tmp_path) as side, side.store() as blobs:
        manifest = side.manifest
        spec = store.describe(manifest, "float32")
        model = LocalModel(side.snapshot(), manifest, spec, side.weights(blobs))
        backend = RankedBackend(model, ("cpu", "cpu"))
        with backend.ranks:
            side.hub.weight_ranges()
            measured = backend.standing_in()
            measured.load(Span(2, 3), ignore)()
            measured.engine.detach(Span(2, 3))
            assert side.hub.weight_ranges() == {}
            backend.load(Span(0, 6), ignore)()
            assert side.hub.weight_ranges()
            assert generate(Running(model, backend), PROMPT, 8) == greedy_reference(folder, PROMPT, 8)
            backend.engine.detach(Span(1, 2))
            with side.weights(blobs).ready(Span(1, 2), manifest, ignore) as parts:
                path = next(iter(parts.values())).path
            path.write_bytes(bytes(path.stat().st_size))
            backend.load(Span(1, 2), ignore)()  # what the disk has spoiled is fetched again
            assert generate(Running(model, backend), PROMPT, 8) == greedy_reference(folder, PROMPT, 8)
