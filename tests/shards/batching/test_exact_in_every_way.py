"""Every model that docs/MODELS.md says is served: split, batched, shared, preempted, rounded, quantized, divided."""

import pytest
from generate_models import PATH, served_rows
from support.models.circuit_runs import Circuit
from support.models.exactness import SPLITS, WHOLE, shares_prefixes
from support.models.measured_models import (
    VARIANTS,
    TinyModel,
    division_faults,
    in_bfloat16,
    joining_faults,
    preemption_faults,
    quantization_faults,
    rounding_faults,
    sharing_faults,
    tiny_model,
)
from support.pairwise import usually

from molink.shards.errors import UnsupportedArchitecture
from molink.shards.loading.loader import folder_refusal

QUICK = ("gemma2", "qwen3_next")
"""With windows and caps, and beside them all that plain layers have; with states, experts and full attention."""
ROUNDED = ("gemma2",)
"""In bfloat16 in every run."""
UNQUANTIZED = ("inkling_mm_model", "inkling_text", "llama4", "llama4_text")
"""Their experts are multiplied all at once, and quantized ones come one by one."""
UNSHRUNK = ("dbrx",)
"""Their experts' matrices are no weights by name, and stay as they are."""
ROWS = (*served_rows(PATH.read_text(encoding="utf-8")), *VARIANTS)


@pytest.fixture(
    scope="module",
    params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in ROWS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((WHOLE, SPLITS[1]), id="one and three hops"),
        pytest.param((SPLITS[0],), id="two hops", marks=pytest.mark.full),
    ],
)
def circuits(model: TinyModel, request: pytest.FixtureRequest) -> list[Circuit]:
    return [model.circuit(cuts) for cuts in request.param]


def test_sessions_that_join_each_other_are_exact(model: TinyModel, circuits: list[Circuit]) -> None:
    assert not any(joining_faults(model, circuit) for circuit in circuits)


def test_sessions_that_share_prefixes_are_exact(model: TinyModel, circuits: list[Circuit]) -> None:
    """What they have in common is computed once, wherever they are split, unless layers keep states."""
    assert len(set(map(shares_prefixes, circuits))) == 1
    assert not any(sharing_faults(model, circuit) for circuit in circuits)


@pytest.mark.full
def test_preempted_sessions_are_exact(model: TinyModel, circuits: list[Circuit]) -> None:
    assert not any(preemption_faults(model, circuit) for circuit in circuits)


@pytest.mark.full
@pytest.mark.parametrize("model", usually(ROUNDED, ROWS), indirect=True)
def test_in_bfloat16_they_differ_by_rounding_only(model: TinyModel) -> None:
    assert rounding_faults(in_bfloat16(model)) == []


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_parts_of_a_quantized_model_compute_what_it_computes(model: TinyModel, quantization: str) -> None:
    faults = quantization_faults(model, quantization)
    if model.name in UNSHRUNK:
        assert faults == ["matrices are no smaller"]
    elif model.name in UNQUANTIZED:
        assert (
            [fault for fault in faults if fault.startswith("it is refused: a trial step failed")]
            == faults
            != []
        )
    else:
        assert faults == []


def test_two_ranks_compute_what_one_does_or_are_refused(model: TinyModel) -> None:
    if folder_refusal(model.folder, 2) is None:
        assert division_faults(model, 2) == []
    else:
        with pytest.raises(UnsupportedArchitecture, match="several devices cannot share it"):
            division_faults(model, 2)
