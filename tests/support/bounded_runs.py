"""Bounds of a test run, as a plugin of pytest: which tests run, how many at once, how long each may take, and all.

A test that exceeds its timeout fails by the exception that pytest-timeout raises from a signal. An event loop may take
that exception for a failure of whichever callback was running, and go on. So every test has a second bound behind the
first: `timeout_grace` seconds later faulthandler writes the stacks of all threads and ends the process. xdist then
names the test, and a new worker runs the others.
"""

import faulthandler
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from molink.peer.device.device import free_memory_bytes, processor_count

WORKER_BYTES = 1.5e9
"""Memory that one worker takes with torch, transformers and what its tests make. With less, tests are killed."""
LONG = "full"
APART = frozenset({"attack", "chaos", "fuzz", "triton", "environments", "dependencies"})
"""Markers of tests that have a command of their own."""
STDERR = pytest.StashKey[int]()
BOUND_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("timeout_grace", "seconds after its timeout until a test's process is ended", default="30")
    parser.addoption("--full", action="store_true", help="run tests marked full and triton too")
    parser.addoption("--minutes", type=float, help="start no test after so many minutes")


def pytest_xdist_auto_num_workers() -> int:
    return workers(processor_count(), free_memory_bytes("cpu"))


def workers(processors: int, free_bytes: float) -> int:
    """Workers of `-n auto`: one for each processor, and no more than there is memory for."""
    return max(1, min(processors, int(free_bytes / WORKER_BYTES)))


class FileScheduling(LoadFileScheduling):
    """Tests of a file run in one process, which has their fixtures. Those of a worker that dies are given to the next.

    `LoadFileScheduling` would give it the test that killed the first one again, and may wait for ever for a worker that
    has one test left: it starts a test when it knows the next.
    """

    def remove_node(self, node: Any) -> str | None:  # noqa: ANN401 - xdist's worker
        left = {
            scope: {test: False for test, is_done in tests.items() if not is_done}
            for scope, tests in self.assigned_work.pop(node).items()
        }
        killer = next((test for tests in left.values() for test in tests), None)
        for tests in left.values():
            tests.pop(killer, None)
        self.workqueue.update({scope: tests for scope, tests in left.items() if tests})
        for other in self.assigned_work:
            self._reschedule(other)
        return killer

    def schedule(self) -> None:
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:  # noqa: ANN401 - xdist's log
    return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # captured while tests run, but not yet
    if (minutes := config.getoption("minutes")) is not None:
        given = getattr(config, "workerinput", {})
        config.pluginmanager.register(Deadline(given.get("deadline_s", time.monotonic() + 60 * minutes)))


def pytest_unconfigure(config: pytest.Config) -> None:
    if (stderr := config.stash.get(STDERR, None)) is not None:
        os.close(stderr)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests with markers that `-m` does not name, unless tests are named on the command line."""
    if any("::" in argument for argument in config.args):
        return
    named = set(re.findall(r"\w+", config.getoption("markexpr")))
    if config.getoption("full"):
        named |= {LONG, "triton"}
    chosen = {item: is_chosen({mark.name for mark in item.iter_markers()}, named) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]


def is_chosen(marks: set[str], named: set[str]) -> bool:
    """True for a test that a run is to include whose expression names these markers."""
    if apart := marks & APART:
        return bool(apart & named)
    return LONG not in marks or LONG in named


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:  # noqa: ANN401 - pytest-timeout's
    """Sets the second bound; returns None, so that pytest-timeout sets the first."""
    bound_s = settings.timeout + float(item.config.getini("timeout_grace"))
    item.stash[BOUND_S] = bound_s
    faulthandler.dump_traceback_later(bound_s, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Bounds the teardown anew: pytest cancels both bounds when a test fails."""
    if (bound_s := item.stash.get(BOUND_S, None)) is not None:
        faulthandler.dump_traceback_later(bound_s, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


class Deadline:
    """Starts no test after a moment of the monotonic clock, the same one in all workers."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.not_started = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() < self.at_s:
            return None
        self.not_started += 1
        return True

    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401 - xdist's worker
        node.workerinput["deadline_s"] = self.at_s

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["not_started"] = self.not_started

    def pytest_testnodedown(self, node: Any) -> None:  # noqa: ANN401 - xdist's worker
        self.not_started += getattr(node, "workeroutput", {}).get("not_started", 0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.not_started:
            terminalreporter.write_line(f"The time was up: {self.not_started} tests were not started")
