"""Parts of copies are written several at a time; those that a session waits for come first, and hold up no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from support.circuits.counted_copies import LINE_BYTES, PLAN, CountingEngine, kept_copy
from support.links.data_plane import SPEC, asynchronous

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.copy_writer import CopyWriter
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.idle_engine import IdleEngine, IdleWork, NextWork
from molink.peer.engine.kept_copy import KeptCopy
from molink.peer.redundancy.copy_sending import PORTION_BYTES
from molink.peer.wire.protocol import molink_pb2 as pb

TOKENS = 4
"""Of a part."""


class IdleMoments:
    """As the engine's idle moments, which come when the test says so."""

    def __init__(self) -> None:
        self.next_work: NextWork = lambda: None
        self.is_awaited: Callable[[], bool] = lambda: False

    def add_source(self, source: NextWork, is_awaited: Callable[[], bool], _: NextWork) -> None:
        self.next_work, self.is_awaited = source, is_awaited

    def begin(self) -> IdleWork:
        work = self.next_work()
        assert work is not None
        return work

    def one(self) -> None:
        work = self.begin()
        work.done(work.function())


class Standby:
    """A peer that keeps these copies."""

    def __init__(self, *copies: KeptCopy) -> None:
        self.idle = IdleMoments()
        self.written: list[tuple[int, int]] = []
        """Which copy was written, and how many tokens it has."""
        self.faults: list[int] = []
        kept = {bytes([at]): one for at, one in enumerate(copies)}
        for session, one in kept.items():
            one.plan = replace(PLAN, key=PLAN.key._replace(session=session))
        engine, idle = cast("StageEngine", CountingEngine()), cast("IdleEngine", self.idle)
        self.writer = CopyWriter(engine, EngineThread(), idle, kept, self._hear)

    def _hear(self, kept: KeptCopy, fault: Exception | None) -> None:
        at = kept.plan.key.session[0]
        self.written.append((at, kept.intake.kept_tokens))
        if fault is not None:
            self.faults.append(at)


def add_parts(kept: KeptCopy, count: int, token_bytes: int = LINE_BYTES) -> None:
    """So many parts have come of a copy's keys and values."""
    for _ in range(count):
        content = bytes(TOKENS * token_bytes)
        part = pb.CopyPart(start=kept.intake.awaited_tokens, tokens=TOKENS, payload_bytes=len(content))
        assert kept.fault_of(part, SPEC) is None
        kept.add(part, content, 0.0)


@asynchronous
async def test_parts_of_several_copies_are_written_in_one_go_those_first_that_a_session_waits_for() -> None:
    ordinary, awaited = kept_copy(1), kept_copy(1)
    standby = Standby(ordinary, awaited)
    add_parts(ordinary, 2)
    add_parts(awaited, 3)
    awaited.is_awaited = True
    standby.idle.one()
    assert standby.written == [(1, 3 * TOKENS), (0, 2 * TOKENS)]
    assert standby.idle.next_work() is None


@asynchronous
async def test_no_more_is_written_in_one_go_than_a_portion_and_one_part_in_any_case() -> None:
    kept = kept_copy(1)
    standby = Standby(kept)
    fit = PORTION_BYTES // (TOKENS * LINE_BYTES)
    kept.intake.capacity_tokens = 10 * fit * TOKENS
    add_parts(kept, 2 * fit)
    standby.idle.one()
    standby.idle.one()
    assert standby.written == [(0, fit * TOKENS), (0, 2 * fit * TOKENS)]


@asynchronous
async def test_a_part_that_is_none_ends_its_own_copy_alone() -> None:
    wrong, right = kept_copy(1), kept_copy(1)
    standby = Standby(wrong, right)
    add_parts(wrong, 2, LINE_BYTES + 1)
    add_parts(right, 1)
    standby.idle.one()
    assert standby.faults == [0]
    assert (wrong.intake.kept_tokens, right.intake.kept_tokens) == (0, TOKENS)


@pytest.mark.parametrize("between_steps", [False, True])
@asynchronous
async def test_keys_and_values_are_written_between_the_steps_of_a_busy_engine_where_holders_share_work(
    between_steps: bool,
) -> None:
    kept = kept_copy(1)
    standby = Standby(kept)
    standby.writer.between_steps = between_steps
    assert not standby.idle.is_awaited()
    add_parts(kept, 1)
    assert standby.idle.is_awaited() is between_steps
    standby.idle.one()
    assert not standby.idle.is_awaited()


@asynchronous
async def test_what_is_being_written_stays_when_a_copy_begins_anew() -> None:
    kept = kept_copy(1)
    standby = Standby(kept)
    add_parts(kept, 2)
    work = standby.idle.begin()
    add_parts(kept, 1)
    kept.restart()
    assert standby.idle.next_work() is None
    work.done(work.function())
    assert (kept.intake.kept_tokens, kept.intake.awaited_tokens) == (2 * TOKENS, 2 * TOKENS)
    assert not kept.waiting
