"""What a user's command waits for before it begins."""

import subprocess
import sys

import pytest

LOADED = "import {module}, sys; print(*sorted(set({heavy!r}).intersection(sys.modules)))"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("molink.client.commands.cli", ["torch", "transformers", "libp2p", "grpc", "numpy", "tokenizers"]),
        ("molink.client.api.swarm", ["torch", "transformers", "accelerate", "bitsandbytes", "matplotlib", "fastapi"]),
        ("molink.peer.commands.cli", ["torch", "transformers", "libp2p", "grpc", "numpy"]),
    ],
)  # fmt: skip
def test_what_is_not_needed_is_not_loaded(module: str, heavy: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module, heavy=heavy)],
        check=True,
        timeout=180,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == []


@pytest.mark.full
def test_modules_are_loaded_without_collecting_garbage_and_what_they_made_is_not_walked_again() -> None:
    script = (
        "import gc\n"
        "from molink.commands import loading_modules\n"
        "with loading_modules():\n"
        "    assert not gc.isenabled()\n"
        "    import molink.client.api.swarm\n"
        "assert gc.isenabled()\n"
        "assert gc.get_freeze_count() > 10_000\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
