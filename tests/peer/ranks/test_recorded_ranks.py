"""Ranks of a peer record their steps, sums included, all of them or none."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.devices.obeying_ranks import obeying_engine
from support.devices.paged_reference import Tapes, WrittenOut, decoding_here
from support.models.tiny_models import greedy_references, make_tiny_model
from torch import Tensor
from transformers import AutoConfig

from molink.peer.models.model import LocalModel
from molink.peer.ranks.backend import RankedEngine
from molink.peer.ranks.processes import RankRefused, RanksLost
from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Rows
from molink.shards.checkpoint import store
from molink.shards.loading.self_check import self_check
from molink.shards.sampling.sampling import Sampled
from molink.shards.spec import Span

PROMPTS = [[5, 6, 7], [9, 11], [200, 3, 4, 8]]
TOKENS = 8
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("ranks"), num_hidden_layers=2)
    manifest = store.read_manifest(folder)
    return LocalModel(folder, manifest, store.describe(manifest, "float32"))


@pytest.fixture(scope="module")
def expected(model: LocalModel) -> list[list[int]]:
    return greedy_references(model.folder, PROMPTS, TOKENS)


def generate(engine: RankedEngine, spans: Sequence[Span]) -> list[list[int]]:
    """All prompts together."""
    caches = [[engine.new_cache(span, 24) for _ in PROMPTS] for span in spans]
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    new = PROMPTS
    while len(drawn[0]) < TOKENS:
        given: Tensor | None = None
        for span, its in zip(spans, caches, strict=True):
            rows = [
                Rows(cache, len(ids), None if span.start else tuple(ids), logit_rows=1)
                for cache, ids in zip(its, new, strict=True)
            ]
            result = engine.step(span, rows, given)
            given = result if isinstance(result, Tensor) else None
        for told, one in zip(drawn, result, strict=True):
            assert isinstance(one, Sampled)
            told.append(one.token_id)
        new = [told[-1:] for told in drawn]
    return drawn


def recorded(engine: RankedEngine) -> int:
    count = 0
    while engine.record_next():
        count += 1
    return count


def test_ranks_believe_what_the_peer_remembers_of_a_models_kind(model: LocalModel, tmp_path: Path) -> None:
    digests = tmp_path / "digests"
    self_check(AutoConfig.from_pretrained(model.folder), digests)
    (remembered,) = digests.iterdir()
    remembered.write_text('{"batching": null, "reason": "as was found out before"}', encoding="utf-8")
    decodings = [decoding_here(sizes=SIZES)[0] for _ in range(2)]
    with (
        pytest.raises(RankRefused, match="as was found out before"),
        obeying_engine(replace(model, digests=digests), decodings, tmp_path, (Span(0, 2),)),
    ):
        pass


@pytest.mark.parametrize("spans", [(Span(0, 2),), (Span(0, 1), Span(1, 2))])
def test_recorded_ranks_sum_in_their_recordings(
    model: LocalModel, expected: list[list[int]], spans: tuple[Span, ...], tmp_path: Path
) -> None:
    watched = [decoding_here(sizes=SIZES) for _ in range(2)]
    with obeying_engine(model, [one for one, *_ in watched], tmp_path, spans) as (engine, ranks):
        assert recorded(engine) == len(spans) * len(SIZES)
        assert generate(engine, spans) == expected
        sums = [answer["sums"] for what, answer in ranks.told if what == "step"]
        assert sums[len(spans) :] == [0] * len(spans) * (TOKENS - 1), "Python makes none in a recorded step"
        assert sums[0] == 2 * len(spans[0])
        for _, _, tapes in watched:
            assert tapes.sizes == list(SIZES) * len(spans)
            assert tapes.replays == len(spans) * (TOKENS - 1)


def test_a_span_that_no_load_named_is_recorded_when_its_first_session_opens(
    model: LocalModel, expected: list[list[int]], tmp_path: Path
) -> None:
    watched = [decoding_here(sizes=SIZES) for _ in range(2)]
    spans = (Span(0, 1), Span(1, 2))
    with obeying_engine(model, [one for one, *_ in watched], tmp_path, spans) as (engine, _):
        recorded(engine)
        assert generate(engine, [model.spec.whole]) == expected
        assert [len(tapes.sizes) for *_, tapes in watched] == [3 * len(SIZES)] * 2


class Fails:
    """A recorder whose capture, or what it has captured, fails from some call on."""

    def __init__(self, *, captures: int = 100, replays: int = 100) -> None:
        self.tapes = Tapes()
        self._captures = captures
        self._replays = replays

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        replay = self.tapes.record(step)
        self._captures -= 1
        if self._captures < 0:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replayed() -> Tensor:
            self._replays -= 1
            if self._replays < 0:
                raise RuntimeError("the graph could not be launched")
            return replay()

        return replayed


class CannotAttend(WrittenOut):
    """Kernels that this rank's card cannot run."""

    def attend(self, *_: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("captures", [0, 2])
def test_what_one_rank_cannot_capture_no_rank_replays(
    model: LocalModel,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
    captures: int,
    tmp_path: Path,
) -> None:
    well, failing = Tapes(), Fails(captures=captures)
    decodings = [Decoding(WrittenOut(), one, SIZES) for one in (well, failing)]
    with obeying_engine(model, decodings, tmp_path, [model.spec.whole]) as (engine, ranks):
        assert recorded(engine) == captures + 1
        assert generate(engine, [model.spec.whole]) == expected
        steps = [answer["sums"] for what, answer in ranks.told if what == "step"]
        assert steps == [2 * model.spec.layers] * TOKENS, "three sessions are of the size that failed"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 2, "one sentence from each rank"
    assert any("another rank could not record the step" in one for one in told)
    assert any("operation not permitted when stream is capturing" in one for one in told)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_attends_in_another_way_keeps_all_from_recording(
    model: LocalModel, expected: list[list[int]], broken: int, tmp_path: Path
) -> None:
    recorders = [Tapes(), Tapes()]
    decodings = [
        Decoding(CannotAttend() if index == broken else WrittenOut(), recorders[index], SIZES)
        for index in range(2)
    ]
    with obeying_engine(model, decodings, tmp_path, [model.spec.whole]) as (engine, _):
        assert recorded(engine) == 0
        assert generate(engine, [model.spec.whole]) == expected
    assert [one.sizes for one in recorders] == [[], []]


def test_a_replay_that_fails_on_one_rank_ends_them_and_gives_no_token(
    model: LocalModel, expected: list[list[int]], tmp_path: Path
) -> None:
    """The other has replayed: what the step gives cannot be made good."""
    decodings = [Decoding(WrittenOut(), one, SIZES) for one in (Tapes(), Fails(replays=len(SIZES) + 2))]
    whole = model.spec.whole
    with obeying_engine(model, decodings, tmp_path, [whole]) as (engine, _):
        recorded(engine)
        cache = engine.new_cache(whole, 24)
        drawn: list[int] = []

        def go_on() -> None:
            while len(drawn) < TOKENS:
                new = tuple(drawn[-1:] or PROMPTS[0])
                (one,) = engine.step(whole, [Rows(cache, len(new), new, logit_rows=1)], None)
                assert isinstance(one, Sampled)
                drawn.append(one.token_id)

        with pytest.raises(RanksLost, match="a step without this one"):
            go_on()
        assert drawn == expected[0][:3]
