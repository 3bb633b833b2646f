"""Steps aside for the volunteer and comes back: what the host policy decides is done here."""

import asyncio
import logging
from collections.abc import Callable

import psutil

from molink.peer.announcing.announcer import Announcer
from molink.peer.device.device import give_back_memory
from molink.peer.engine.guessing import HeadGuesses
from molink.peer.host_policy.readings import ReadMachine
from molink.peer.host_policy.rules import RESUME_AFTER_S, HostPolicy, PauseState, Readings, next_pause_state
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.serving.data_plane import DataPlane
from molink.shards.errors import WeightsError
from molink.shards.spec import Span, merge_spans

LOOK_EVERY_S = 1.0
GRACE_S = 3.0
"""Sessions that are about to end may do so within this time; the others are handed back to their clients."""
_ENDED_EVERY_S = 0.05
_log = logging.getLogger(__name__)


class Pausing:
    """Owner of a peer's pauses: while one lasts it grants no lease and holds no weights."""

    def __init__(
        self,
        rules: HostPolicy,
        device: str,
        read: ReadMachine,
        leases: LeaseBook,
        serving: DataPlane,
        announcer: Announcer,
        say: Callable[[str], None],
    ) -> None:
        self._rules = rules
        self._device = device
        self._read = read
        self._leases = leases
        self._serving = serving
        self._announcer = announcer
        self._say = say
        self._state = PauseState()
        self._held: tuple[Span, ...] = ()
        """What it held when it paused, to be loaded again."""
        self._resuming: asyncio.Task[None] | None = None

    @property
    def paused_for(self) -> str | None:
        """Why the peer is paused; None: it is not."""
        return self._state.paused_for

    async def enforce(self) -> None:
        """Pauses and resumes as the rules say, until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                readings = await self._look()
                if readings is None:
                    await asyncio.sleep(LOOK_EVERY_S)
                    continue
                before = self.paused_for
                self._state = next_pause_state(self._state, readings, self._rules, self._device, clock())
                if self.paused_for is None and before is not None:
                    self._say("Resumes: no reason to pause is left")
                    self._resuming = asyncio.create_task(self._resume(), name="resume")
                elif self.paused_for is not None and before is None:
                    await self._pause(self.paused_for)
                elif self.paused_for is not None:
                    await self._let_go_of_weights()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._stop_resuming()

    async def _look(self) -> Readings | None:
        """None: nothing can be told now, because descriptors, threads or memory have run out."""
        try:
            return await asyncio.to_thread(self._read)
        except (OSError, RuntimeError, MemoryError, psutil.Error) as error:
            _log.debug("the machine cannot be read: %s", error)
            return None

    async def _pause(self, reason: str) -> None:
        self._say(f"Pauses: {reason}")
        unloaded = await self._stop_resuming()
        detail = f"this peer is paused ({reason}): choose another"
        self._leases.gate.close(Refused("busy", detail, RESUME_AFTER_S))
        self._serving.say_leaving(GRACE_S, f"it is paused: {reason}")
        await self._announcer.announce()
        deadline_s = asyncio.get_running_loop().time() + GRACE_S
        while self._leases.leases and asyncio.get_running_loop().time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_ENDED_EVERY_S)  # the event of a change is the announcer's
        self._serving.admission.hand_back(detail)
        self._held = unloaded
        await self._let_go_of_weights()

    async def _let_go_of_weights(self) -> None:
        """Also of those whose load ended only now: a load that has begun cannot be stopped."""
        held = self._leases.held
        if isinstance(guesses := self._serving.stepper.guessing.source_of, HeadGuesses):
            guesses.rest(self._device)
        if not held:
            return
        try:
            await self._serving.loader.drop(held)
        except ValueError as error:  # something still uses them: it is looked at again
            _log.info("the weights stay for now: %s", error)
            return
        self._held = merge_spans((*self._held, *held))
        give_back_memory(self._device)

    async def _resume(self) -> None:
        """Loads what was held; only then the swarm hears that this peer is back."""
        self._leases.gate.reopen("busy")
        now_s = asyncio.get_running_loop().time()
        refused = [
            answer for span in self._held if isinstance(answer := self._leases.preload(span, now_s), Refused)
        ]
        for answer in refused:
            _log.warning("not everything is loaded again: %s", answer.detail)
        try:
            await asyncio.gather(*map(self._serving.loader.load, self._held))
        except (WeightsError, OSError, MemoryError, RuntimeError, ValueError) as error:
            _log.error("the layers could not be loaded again: %s", error)
        if isinstance(guesses := self._serving.stepper.guessing.source_of, HeadGuesses):
            guesses.wake()
        await self._announcer.announce(facts_too=True)  # who avoided this peer need not any more

    async def _stop_resuming(self) -> tuple[Span, ...]:
        """Ends a return that has not come to its end; returns what it would have loaded."""
        resuming, self._resuming = self._resuming, None
        if resuming is None or resuming.done():
            return ()
        resuming.cancel()
        await asyncio.gather(resuming, return_exceptions=True)
        return self._held
