"""At the head: sessions that have started, whose prompts may wait a moment for those of others that are about to."""

import asyncio
import time
from collections.abc import Callable

from molink.peer.engine.sessions import HopSession
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.prompt_gathering import PromptGathering


class Starts:
    """Owner of the prompts of which nothing has been queued. On the event loop."""

    def __init__(
        self, gathering: PromptGathering | None, begin: Callable[[HopSession], None], wake: Callable[[], None]
    ) -> None:
        """`begin` queues a prompt; `wake` is called when somebody has waited long enough. Without `gathering` nobody
        waits."""
        self._gathering = gathering
        self._begin = begin
        self._wake = wake
        self._waiting: dict[LeaseKey, HopSession] = {}
        self._look: asyncio.TimerHandle | None = None

    def expect_prompt(self, session: HopSession) -> None:
        """Its lease has been granted, or is ready: if its head is here, it may start any moment."""
        if self._gathering is not None and session.is_head and not session.next_step:
            tokens = session.plan.prompt_tokens - session.prefix_tokens
            self._gathering.expect_prompt(session.key, session.span, tokens, time.perf_counter())

    def add_prompt(self, session: HopSession, tokens: int) -> None:
        """There are so many tokens to compute. Begins now, or with a later `release_ready`."""
        if self._gathering is None:
            self._begin(session)
            return
        self._waiting[session.key] = session
        self._gathering.add_prompt(session.key, session.span, tokens)

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._waiting.pop(key, None)
        if self._gathering is not None:
            self._gathering.forget_session(key)

    def release_ready(self) -> None:
        """The engine is free: begins what waits no longer, and sees to it that the others do not wait for ever."""
        if self._gathering is None or not self._waiting:
            return
        now_s = time.perf_counter()
        for key in self._gathering.release_ready(now_s):
            self._begin(self._waiting.pop(key))
        due_s = self._gathering.due_s(now_s)
        if due_s is not None and self._look is None:
            delay_s = max(0.0, due_s - now_s)
            self._look = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._wake()
