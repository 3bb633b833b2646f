"""The kernels of a GPU, without one: in Triton's interpreter they are the definition in float64, and compiled for each
card that is served they keep its limits.

Triton is 690 MB that nothing else here needs, and what sees it installed (torch, transformers, bitsandbytes) loads it
at every start. `make test-triton` puts it into a folder of its own, and only the processes of this file look there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRITON = ROOT / "build" / "triton"
pytestmark = pytest.mark.triton
SPILLED_BYTES = 64
"""Of a thread's registers: a few that are used once cost nothing."""


def run(script: str, *arguments: str, interpret: bool = False) -> dict[str, object]:
    """The JSON that a script of tests/gpu prints."""
    folders = (str(TRITON), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu" / "kernels" / script), *arguments],
        capture_output=True, text=True, timeout=1800, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}\nTriton comes with `make test-triton`"
    found: dict[str, object] = json.loads(done.stdout)
    return found


def compared(*arguments: str) -> dict[str, object]:
    return run("kernel_interpreter.py", *arguments, interpret=True)


def compiled(*arguments: str) -> dict[str, object]:
    return run("kernel_targets.py", *arguments)


PARTS = 4
CARDS = ("0", "1", "2")
"""Of `kernel_interpreter.CARDS`."""
CAPABILITIES = ("75", "80", "86", "89", "90", "100", "120")


def fits(found: dict[str, object]) -> bool:
    """Whether compiled kernels keep a card's limits, and their numbers in registers."""
    spilling = [one for one in found["spilling"] if one["spilled_bytes"] > SPILLED_BYTES]  # type: ignore[attr-defined]
    return (found["faults"], spilling) == ([], [])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted_attention_is_float64_up_to_rounding_and_reads_nothing_poisoned(part: int) -> None:
    found = compared("--pairs", "--longest", "700", "--part", f"{part}", "--parts", f"{PARTS}")
    assert found["faults"] == []
    assert found["compared"] * PARTS == found["of"] == 80  # type: ignore[operator]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted_norms_gates_products_with_bytes_and_latents_are_float64_up_to_rounding(
    part: int,
) -> None:
    found = compared("--layers", "--small", "--part", f"{part}", "--parts", f"{PARTS}")
    assert found["faults"] == []
    assert found["of"] == 3 * (3 * 3 * 2 + 2 * 2) + 3 * 2 + 3 * (3 * 2 * 3 + 3 * 3 * 3)


@pytest.mark.timeout(900)
def test_interpreted_drawings_are_those_of_the_operations_that_they_stand_for() -> None:
    found = compared("--drawing", "--small")
    assert found["faults"] == []
    assert found["compared"] == 3 * 4 * (3 + 3)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted_drawings_from_large_vocabularies_are_those_of_the_operations(part: int) -> None:
    assert compared("--drawing", "--part", f"{part}", "--parts", f"{PARTS}")["faults"] == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_interpreted_kernels_of_layers_of_every_width_are_float64(part: int) -> None:
    assert compared("--layers", "--part", f"{part}", "--parts", f"{PARTS}")["faults"] == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("head_dim", ["64", "80", "96", "128", "192", "256"])
def test_interpreted_attention_of_every_shape_to_32000_tokens_is_float64(head_dim: str, card: str) -> None:
    found = compared("--head-dims", head_dim, "--cards", card)
    assert found["faults"] == []
    assert found["compared"] == 3 * (8 + 9)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_keep_the_limits_of_every_card(capability: str) -> None:
    found = compiled("--capabilities", capability, "--pairs")
    assert fits(found), found


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiled_kernels_of_every_shape_keep_the_limits(dtype: str, capability: str) -> None:
    found = compiled("--capabilities", capability, "--dtypes", dtype)
    assert fits(found), found
    layers, latents, drawings = 3 * (6 + 2 + 7), 3, 2 * 15
    assert found["compiled"] == 6 * 3 * (2 + 3 * 2) + layers + latents + drawings
