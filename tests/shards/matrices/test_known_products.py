"""Which products are fastest is measured once, and packing may wait; tokens are the same before and after."""

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import greedy, spec_for
from support.models.tiny_models import LAYERS
from support.pairwise import usually
from torch import Tensor, nn

from molink.shards.batching.engine import Engine
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.matrices import known_products, linear, products
from molink.shards.matrices.known_products import KnownProducts
from molink.shards.matrices.linear import packed_for_onednn
from molink.shards.matrices.products import Timings
from molink.shards.model.later_packing import LaterPacking
from molink.shards.model.stage import Stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
WHOLE = Span(0, LAYERS)
PROMPT = (5, 9, 200, 31, 7)
MACHINE = "A processor"


@pytest.fixture
def measured(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Tensor]]:
    """The matrices of each measurement; tiny ones are worth it, and packing pays."""
    load_stage(
        tiny_model("llama"), Span(1, 2), StageSettings("float32")
    )  # its kind is checked, with products of its own
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(products, "TIMED_ROWS", (1, 8))
    monkeypatch.setattr(Timings, "pays", lambda *_: True)
    found: list[Sequence[Tensor]] = []
    fastest = linear.fastest

    def measuring(weights: Sequence[Tensor], *rest: object) -> object:
        found.append(weights)
        return fastest(weights, *rest)

    monkeypatch.setattr(linear, "fastest", measuring)
    return found


def load(
    folder: Path, notes: Path, *, machine: str = MACHINE, exact: bool = False, packs_later: bool = False
) -> Stage:
    known = KnownProducts(notes, machine)
    stage = load_stage(
        folder,
        WHOLE,
        StageSettings("float32", exact=exact, packs_later=packs_later),
        cache=LoadCache(known_products=known),
    )
    known.keep(certain=True)
    return stage


def engine_of(stage: Stage) -> Engine:
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    return engine


def packed_bytes(stage: Stage) -> int:
    return sum(weight.nbytes for weight in stage.parameters() if weight.is_mkldnn)


def test_a_later_load_measures_no_products(
    tiny_model: TinyModel, tmp_path: Path, measured: list[Sequence[Tensor]]
) -> None:
    folder = tiny_model("llama")
    first, later = load(folder, tmp_path), load(folder, tmp_path)
    assert len(measured) == 1
    assert packed_bytes(first) == packed_bytes(later)
    assert greedy([(engine_of(later), WHOLE)], PROMPT, 6) == greedy([(engine_of(first), WHOLE)], PROMPT, 6)


def test_another_processor_number_of_threads_or_exactness_is_measured_anew(
    tiny_model: TinyModel, tmp_path: Path, measured: list[Sequence[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model("llama")
    load(folder, tmp_path)
    load(folder, tmp_path, machine="Another processor")
    load(folder, tmp_path, exact=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    load(folder, tmp_path)
    assert len(measured) == 4


@pytest.mark.parametrize(
    "content",
    usually(
        [b"", b'{"choice": [[1, 99]], "packs": false}', b'{"choice": [[1, true]], "packs": true}'],
        [b"[]", b'{"choice": [], "packs": true}', b'{"choice": [[1, 0]], "packs": 1}',
         b'{"choice": [[2, 0]], "packs": true}'],
    ),
)  # fmt: skip
def test_a_damaged_note_is_measured_anew_and_mended(
    content: bytes, tiny_model: TinyModel, tmp_path: Path, measured: list[Sequence[Tensor]]
) -> None:
    folder = tiny_model("llama")
    load(folder, tmp_path)
    (note,) = tmp_path.glob("products-*.json")
    note.write_bytes(content)
    load(folder, tmp_path)
    load(folder, tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize(("age_s", "times"), [(60.0, 1), (23 * 3600.0, 1), (25 * 3600.0, 2), (-3600.0, 2)])
def test_what_a_busy_machine_has_measured_is_believed_for_a_day(
    age_s: float,
    times: int,
    tiny_model: TinyModel,
    tmp_path: Path,
    measured: list[Sequence[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, now_s = KnownProducts(tmp_path, MACHINE), time.time()
    load_stage(tiny_model("llama"), WHOLE, StageSettings("float32"), cache=LoadCache(known_products=known))
    known.keep(certain=False)
    monkeypatch.setattr(known_products.time, "time", lambda: now_s + age_s)
    load(tiny_model("llama"), tmp_path)
    assert len(measured) == times


def test_a_decision_that_is_not_kept_is_not_written(
    tiny_model: TinyModel, tmp_path: Path, measured: list[Sequence[Tensor]]
) -> None:
    load_stage(
        tiny_model("llama"),
        WHOLE,
        StageSettings("float32"),
        cache=LoadCache(known_products=KnownProducts(tmp_path, MACHINE)),
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("measured")
def test_weights_that_are_packed_later_serve_before_between_and_after_with_the_same_tokens(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    at_once = load(folder, tmp_path)
    expected = greedy([(engine_of(at_once), WHOLE)], PROMPT, 6)
    stage = load(folder, tmp_path, packs_later=True)
    total = stage.weight_bytes
    engine = engine_of(stage)
    assert packed_bytes(stage) == 0
    assert greedy([(engine, WHOLE)], PROMPT, 6) == expected
    can_pack = packed_for_onednn(torch.zeros(64, 64)) is not None
    assert engine.pack_next()
    assert (0 < packed_bytes(stage) < packed_bytes(at_once)) == can_pack
    assert greedy([(engine, WHOLE)], PROMPT, 6) == expected
    while engine.pack_next():
        assert stage.weight_bytes <= total, "a matrix takes the place of what it was"
    assert packed_bytes(stage) == packed_bytes(at_once)
    assert greedy([(engine, WHOLE)], PROMPT, 6) == expected
    linears = [one for one in stage.model.modules() if isinstance(one, nn.Linear) and one.weight.is_mkldnn]
    assert all(
        one.__dict__.get("weight", one.weight) is dict(one.named_parameters())["weight"] for one in linears
    )


def test_matrices_that_are_gone_when_their_turn_comes_are_passed_over() -> None:
    packing, packed = LaterPacking(), list[nn.Linear]()
    stays, goes = nn.Linear(2, 2), nn.Linear(2, 2)
    for layer in (goes, stays):
        packing.add(layer, packed.append)
    del layer, goes
    gc.collect()
    assert packing.next()
    assert packed == [stays]
    assert not packing.next()
