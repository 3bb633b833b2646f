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


@pytest.mark.timeout(900)
def test_interpreted_kernels_are_float64_up_to_rounding_and_read_nothing_poisoned() -> None:
    found = compared("--head-dims", "64", "--processors", "132", "--longest", "150")
    assert found["faults"] == []
    assert found["compared"] == 3 * 12


@pytest.mark.timeout(900)
def test_interpreted_norms_gates_products_with_bytes_and_latents_are_float64_up_to_rounding() -> None:
    found = compared("--layers", "--small")
    assert found["faults"] == []
    assert found["compared"] == 3 * (3 * 3 * 2 + 2 * 2) + 2 * (3 * 2 * 3 + 3 * 3 * 3)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_interpreted_kernels_of_layers_of_every_width_are_float64() -> None:
    assert compared("--layers")["faults"] == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processors", ["1", "132"])
@pytest.mark.parametrize("head_dim", ["80", "96", "128", "192", "256"])
def test_interpreted_kernels_of_every_head_size_are_float64(head_dim: str, processors: str) -> None:
    found = compared("--head-dims", head_dim, "--processors", processors)
    assert found["faults"] == []


@pytest.mark.timeout(900)
def test_compiled_kernels_keep_the_limits_of_every_card() -> None:
    found = compiled("--head-dims", "128", "--groups", "4", "--dims", "4096", "--dtypes", "bfloat16")
    assert found["faults"] == []
    latents = 1 + 5 * 3  # Turing stores them and has no kernel that attends
    assert found["compiled"] == 6 * (2 + 3 * 2 + 6 + 2 + 6) + latents
    assert [one for one in found["spilling"] if one["spilled_bytes"] > SPILLED_BYTES] == []  # type: ignore[attr-defined]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", ["75", "80", "86", "89", "90", "120"])
def test_compiled_kernels_of_every_head_size_and_dtype_keep_the_limits(capability: str) -> None:
    found = compiled("--capabilities", capability)
    assert found["faults"] == []
    latents = 3 if capability == "75" else 9
    assert found["compiled"] == 6 * 3 * 2 * (2 + 3 * 2) + 3 * 3 * (6 + 2 + 6) + latents
