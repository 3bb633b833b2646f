"""A plugin of pytest that records which lines of the product each test file runs.

Each process of a run measures itself and writes `coverage-PID` into the folder that `--covered` names. The context of a
line is the test file, relative to the root.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

RECORDER = pytest.StashKey[coverage.Coverage]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--covered", help="folder for data of coverage")


def pytest_configure(config: pytest.Config) -> None:
    file = Path(config.getoption("covered")) / f"coverage-{os.getpid()}"
    product = [str(config.rootpath / top) for top in os.environ["MOLINK_MUTATED"].split()]
    recorder = coverage.Coverage(str(file), source=product, config_file=False)
    recorder.set_option("run:disable_warnings", ["no-data-collected"])  # by the process that runs no test
    recorder.start()
    config.stash[RECORDER] = recorder


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[RECORDER].switch_context(item.path.relative_to(item.config.rootpath).as_posix())
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[RECORDER].stop()
    config.stash[RECORDER].save()
