"""`python tests/support/devices/owned_peer.py ARGUMENTS`: `molink-peer ARGUMENTS` that computes slowly.

It is on battery while there is a file beside its state directory with the same name and `.unplugged` behind it: then it
computes so slowly that it pauses in mid-generation, on any machine.
"""

import sys
import time
from pathlib import Path

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import load_lean_transformers

if __name__ == "__main__":  # as `molink-peer` does
    load_lean_libp2p()
    load_lean_transformers()

from molink.peer.commands import cli
from molink.peer.compute.backend import StageEngine
from molink.peer.engine import stepping
from molink.peer.engine.steps import StepInput, StepOutput
from molink.peer.host_policy import pausing, readings, rules, start_wait
from molink.peer.host_policy.rules import Readings

STEP_S, ON_BATTERY_S = 0.02, 0.5
compute = stepping.compute


class Reader:
    """Of the owner's machine."""

    def __init__(self, *_: object, heeds_programs: bool) -> None:  # noqa: ARG002 - as the reader that it stands for
        self._unplugged = unplugged()

    def __call__(self) -> Readings:
        return Readings(0, on_battery=self._unplugged.exists())


def unplugged() -> Path:
    """The file."""
    return Path(sys.argv[sys.argv.index("--state-dir") + 1]).with_suffix(".unplugged")


def compute_slowly(engine: StageEngine, inputs: tuple[StepInput, ...]) -> StepOutput:
    time.sleep(ON_BATTERY_S if unplugged().exists() else STEP_S)
    return compute(engine, inputs)


if __name__ == "__main__":
    readings.MachineReader = Reader  # type: ignore[assignment,misc]
    rules.PAUSE_AFTER_S = rules.RESUME_AFTER_S = 0.1  # type: ignore[misc]
    start_wait.LOOK_EVERY_S = pausing.LOOK_EVERY_S = 0.05  # type: ignore[misc]
    pausing.GRACE_S = 0.0  # type: ignore[misc]
    stepping.compute = compute_slowly  # type: ignore[assignment]
    cli.main()
