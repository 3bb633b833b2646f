"""Tells a watch of decode what the engine does, once the output of what it did before is on its way."""

import asyncio
import time
from collections.abc import Sequence

from molink.peer.engine.steps import StepInput
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_watch import DecodeBatch, DecodeWatch, IterationDetector


class DecodeReports:
    """What is known of the latest decode steps. On the event loop."""

    def __init__(self, watch: DecodeWatch) -> None:
        self._watch = watch
        self._iterations = IterationDetector()
        self._computing: DecodeBatch | None = None
        self._first: DecodeBatch | None = None
        """Those that were first in the latest iteration."""

    def record_begun(self, inputs: Sequence[StepInput]) -> None:
        """The engine computes these."""
        self._computing = _decode_batch(inputs)
        if self._computing is not None:
            self._tell_soon()

    def record_computed(self, inputs: Sequence[StepInput]) -> None:
        """It has computed them."""
        self._computing = None
        stepped = _decode_batch(inputs)
        if stepped is not None:
            if self._iterations.is_first(one.session.key for one in inputs if not one.prefill):
                self._first = stepped
            self._tell_soon()

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._iterations.forget_session(key)

    def _tell_soon(self) -> None:
        """Once this step's output is on its way: what is predicted then is the one after it."""
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        if self._computing is not None:
            self._watch.computing(self._computing)
        elif self._first is not None:
            self._watch.awaiting(self._first)


def _decode_batch(inputs: Sequence[StepInput]) -> DecodeBatch | None:
    """The decode steps among these, as of now; None if there are none."""
    sessions = [one.session for one in inputs if not one.prefill]
    if not sessions:
        return None
    following = frozenset(session.next_peer_id for session in sessions)
    first = sessions[0]
    return DecodeBatch(time.perf_counter(), len(sessions), following, first.plan.stages, first.hop)
