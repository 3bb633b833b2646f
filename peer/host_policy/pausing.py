"""Steps aside for the volunteer and comes back: what the host policy decides is done here."""

import asyncio
import logging
from collections.abc import Callable

from molink.peer.announcing.announcer import Announcer
from molink.peer.device.device import give_back_memory
from molink.peer.engine.guessing import HeadGuesses
from molink.peer.host_policy.readings import LOOK_EVERY_S, ReadMachine, look
from molink.peer.host_policy.reloading import Reload
from molink.peer.host_policy.rules import RESUME_AFTER_S, HostPolicy, PauseState, next_pause_state
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.serving.data_plane import DataPlane

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
        self._reload = Reload()
        """What it held when it paused."""
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
                readings = await look(self._read)
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
                elif self._is_to_load(clock()):
                    self._resuming = asyncio.create_task(self._load_again(), name="load again")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._stop_resuming()

    async def _pause(self, reason: str) -> None:
        self._say(f"Pauses: {reason}")
        await self._stop_resuming()
        detail = f"this peer is paused ({reason}): choose another"
        self._leases.gate.close(Refused("busy", detail, RESUME_AFTER_S))
        self._serving.say_leaving(GRACE_S, f"it is paused: {reason}")
        await self._announcer.announce_or_later()
        deadline_s = asyncio.get_running_loop().time() + GRACE_S
        while self._leases.leases and asyncio.get_running_loop().time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(_ENDED_EVERY_S)  # the event of a change is the announcer's
        self._serving.admission.hand_back(detail)
        self._serving.loader.abandon()
        await self._let_go_of_weights()

    async def _let_go_of_weights(self) -> None:
        """Also of those whose load ended only now: one that has begun ends when its thread next says how far it is."""
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
        self._reload = self._reload.joined(held)
        give_back_memory(self._device)

    async def _resume(self) -> None:
        """Loads what was held; only then the swarm hears that this peer is back."""
        self._leases.gate.reopen("busy")
        await self._load_again()
        if isinstance(guesses := self._serving.stepper.guessing.source_of, HeadGuesses):
            guesses.wake()
        await self._announcer.announce_or_later(facts_too=True)  # who avoided this peer need not any more

    def _is_to_load(self, at_s: float) -> bool:
        """Whether a try has not brought all that was held, and it is time for the next: a peer that takes nothing new
        for another reason waits for the end of that."""
        under_way = self._resuming is not None and not self._resuming.done()
        due = bool(self._reload.spans) and at_s >= self._reload.due_s
        return due and not under_way and not self._leases.gate.is_closed

    async def _load_again(self) -> None:
        """Loads what was held, as far as it can be; what cannot be is tried later, unless others take its place."""
        leases, clock = self._leases, asyncio.get_running_loop().time
        missing = self._reload.missing(leases.held)
        refusals = [
            answer for span in missing if isinstance(answer := leases.preload(span, clock()), Refused)
        ]
        present = (*leases.held, *leases.loading)
        if refusals and not leases.gate.is_closed and self._reload.is_given_up(present):
            _log.info("what was held before the pause is not loaded again: others have taken its place")
            self._reload = Reload()
            return
        loads = map(self._serving.loader.load, missing)
        ended = await asyncio.gather(*loads, return_exceptions=True)  # whatever ends one: the wish stays
        problems = [answer.detail for answer in refusals] + [
            str(one) or repr(one) for one in ended if one is not None
        ]
        self._reload = self._reload.tried(leases.held, clock())
        if self._reload.spans:
            left_s = self._reload.due_s - clock()
            _log.error("not all is loaded again, next try in %.0f s: %s", left_s, "; ".join(problems))

    async def _stop_resuming(self) -> None:
        """Ends a return that has not come to its end."""
        resuming, self._resuming = self._resuming, None
        if resuming is not None and not resuming.done():
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)
