"""Hypothesis profiles: the same cases in every run by default, more of them in `make test-full`, many and new ones for
`make fuzz`. What takes another number of examples than its profile has `support.properties`.

Hypothesis takes some of the numbers and texts that it tries from the source of whatever modules are loaded, so that
cases would depend on which tests ran before. It has no setting for that: where cases are to be the same, it is shown no
module. `make fuzz` keeps them.

A machine that is slow or busy is no failure in either. Its cores are shared, and the tiny matrices of the tests gain
nothing from a second one: torch heeds the variable when it is loaded, in this process and in those that it starts.
No test looks for peers on the network of the machine that it runs on, unless it says so. None asks anybody beyond that
machine: no HTTP client needs to read the authorities of the web, which takes each one 20 ms.

What a process has loaded when its tests begin is no garbage: half a million objects. Where the product looks for
garbage, frozen or not, they took 0.3 s each time, half of what the tests of profiling computed: here they stay frozen.
Nor is any garbage looked for while they are loaded, and what tests make is looked at a tenth as often as usual: a
process of many tests keeps so much that to look took a tenth of its time.

What peers of the tests find out of this machine and of models is kept for later runs (`support.peer_findings`).
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from support.peer_findings import use_findings
from support.properties import WHOLE

import molink

pytest_plugins = ["support.bounded_runs"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MOLINK_LOCAL_NETWORK", "off")
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)  # no authority is there
gc.disable()

for profile, number in (("default", 25), ("full", WHOLE)):
    settings.register_profile(
        profile,
        max_examples=number,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.register_profile(
    "long",
    max_examples=2000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")
freeze, unfreeze = gc.freeze, gc.unfreeze
YOUNG, MIDDLE, OLD = 7000, 10, 10
"""Python's own, but the first, which is tenfold."""

constants_of_loaded_modules = providers._get_local_constants


def constants() -> Constants:
    return Constants() if settings().derandomize else constants_of_loaded_modules()


providers._get_local_constants = constants


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what peers find out beside pytest's own cache, where there is one."""
    if hasattr(config, "cache"):
        use_findings(config.cache.mkdir("peers"), Path(molink.__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def _loaded_modules_are_no_garbage() -> Iterator[None]:
    """What is there stays frozen, and nothing more is frozen: each collection looks at what tests have made."""
    freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    gc.enable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture
def freezing() -> Iterator[None]:
    """For tests of what is frozen: it is, and it is thawed, as in any other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", freeze)
        patch.setattr(gc, "unfreeze", unfreeze)
        yield
    freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One loop for all asynchronous tests and fixtures: a swarm that one test has used serves the next."""
    return "asyncio"
