"""Start wait: a peer that is started while its owner needs the machine begins when the owner does not any more."""

import asyncio
from collections.abc import Callable, Sequence

from molink.peer.host_policy.readings import LOOK_EVERY_S, ReadMachine, look, machine_reader
from molink.peer.host_policy.rules import HostPolicy, PauseState, next_pause_state


class StartWait:
    """Start wait: what would pause a peer that serves keeps one that starts from fetching, measuring and loading."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.reason: str | None = None
        """What it waits for the end of; None: it does not wait."""
        self._say = say

    async def until_over(
        self, rules: HostPolicy, devices: Sequence[str], read: ReadMachine | None = None
    ) -> None:
        """Returns at once where nothing speaks for a pause of a peer on these torch devices, or nothing can be told;
        else when `rules` would have the peer resume. `read` tells what the owner does; by default it is read of this
        machine."""
        read = read or machine_reader(rules, devices)
        clock, state = asyncio.get_running_loop().time, PauseState()
        try:
            while True:
                readings = await look(read)
                if readings is not None:
                    state = next_pause_state(state, readings, rules, devices[0], clock())
                if state == PauseState():
                    return
                if state.paused_for not in (None, self.reason):
                    self._say(f"Waits before it begins: {state.paused_for}")
                self.reason = state.paused_for
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self.reason = None
