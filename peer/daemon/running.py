"""A peer in the foreground of a terminal: its lines on stdout, its control endpoint, and what Ctrl-C does."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Protocol, Self

from molink.commands import EXIT_INTERRUPTED
from molink.configuration import is_loopback
from molink.peer.daemon.control import ControlEndpoint

QUIET_S = 2.0
"""Work shorter than this passes without a progress line, and lines come no more often."""
AT_ONCE_S = 0.4
"""How long a peer that was told to leave at once may still say so to others."""
ENDS_AFTER_S = 0.7
"""Then its process ends, whatever still runs: a second after the signal its memory is the volunteer's again."""
KEY_PLACEHOLDER = "YOUR_COPY_OF_THE_KEY_FILE"


class RunningPeer(Protocol):
    """What this module needs of `molink.peer.daemon.peer.Peer`."""

    @property
    def addresses(self) -> tuple[str, ...]: ...

    @property
    def loads(self) -> bool: ...

    @property
    def serves(self) -> bool: ...

    async def run(self, on_ready: Callable[[Self], None]) -> None: ...

    def leave(self, *, at_once: bool = False) -> None: ...

    def status(self) -> dict[str, object]: ...

    def own_status(self) -> dict[str, object]: ...


class PeerDisplay(Protocol):
    """Draws a peer that serves, while its owner looks."""

    def begin(self, describe: Callable[[], Mapping[str, object]], invitation: str) -> None: ...

    def end(self) -> None: ...


class NoView:
    """No view: the lines on stdout are all."""

    def begin(self, describe: Callable[[], Mapping[str, object]], invitation: str) -> None:
        """Draws nothing."""

    def end(self) -> None:
        """Nothing goes away."""


NO_VIEW: Final = NoView()


class ProgressLines:
    """Shows progress when work takes long: the latest line, not before QUIET_S and not more often.

    The time runs in a thread of its own: modules that load and layers that are measured hold up any event loop.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._latest: str | None = None
        self._over = False

    def report(self, line: str) -> None:
        """Has the line shown when its time comes, unless a newer one takes its place. From any thread."""
        with self._lock:
            self._latest = line
            if self._timer is None and not self._over:
                self._wait()

    def stop(self) -> None:
        """Ends for good: what has not been shown is not worth showing any more."""
        with self._lock:
            self._over = True
            if self._timer is not None:
                self._timer.cancel()

    def _due(self) -> None:
        with self._lock:
            line, self._latest, self._timer = self._latest, None, None
            if line is not None and not self._over:
                self._show(line)
                self._wait()

    def _wait(self) -> None:
        self._timer = threading.Timer(QUIET_S, self._due)
        self._timer.daemon = True
        self._timer.start()


class Interrupts:
    """Ctrl-C, SIGTERM or SIGHUP once: the peer drains and leaves. Twice: it leaves at once. Thrice: the process ends.

    Of SIGHUP only the first counts: a terminal that is closed sends it, and so does the shell that was in it.
    A peer that does not serve yet has nothing to drain: the first one is as the second. What it has fetched is kept.

    Plain signal handlers, because event loops on Windows have none of their own; `run_loop` has them end its wait.
    """

    def __init__(self, peer: RunningPeer, on_leaving: Callable[[], None]) -> None:
        """`on_leaving` is called before a line says that the peer leaves; maybe twice."""
        self._peer = peer
        self._on_leaving = on_leaving
        self._count = 0
        self._life: asyncio.Task[None] | None = None

    @property
    def at_once(self) -> bool:
        """Whether the peer was told to leave at once."""
        return self._count >= 2

    @contextmanager
    def caught(self, life: "asyncio.Task[None]") -> Iterator[None]:
        """Signals come here while the context is open and end `life`; call in a loop of `run_loop`, on the main thread.

        After a signal they do so to the end of the process: the next one ends it, whatever thread still runs.
        """
        loop = asyncio.get_running_loop()
        self._life = life

        def note(number: int, _: FrameType | None) -> None:
            if self._count > 0 and number == getattr(signal, "SIGHUP", None):
                return
            self._count += 1
            if self._count > 2 or life.done():
                os._exit(EXIT_INTERRUPTED)
            loop.call_soon_threadsafe(self._act, self._count)

        before = {number: signal.signal(number, note) for number in _ending_signals()}
        try:
            yield
        finally:
            if self._count == 0:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def leave_at_once(self) -> None:
        """As the second Ctrl-C does. Call it in the loop."""
        self._count = max(2, self._count)
        self._on_leaving()
        say("Leaving at once" if self._peer.serves else "Leaving before anything was served")
        self._peer.leave(at_once=True)
        if self._life is not None:
            asyncio.get_running_loop().call_later(AT_ONCE_S, self._life.cancel)
        end = threading.Timer(ENDS_AFTER_S, os._exit, (EXIT_INTERRUPTED,))
        end.daemon = True
        end.start()

    def _act(self, count: int) -> None:
        if count > 1 or not self._peer.serves:
            self.leave_at_once()
            return
        self._on_leaving()
        say("Leaving when running sessions have ended; Ctrl-C again leaves at once")
        self._peer.leave()


def _ending_signals() -> tuple[int, ...]:
    """The signals that end a peer, on this system. On Windows SIGBREAK is also that of a console that is closed; what
    was started with `nohup` ignores SIGHUP, and goes on to."""
    names = ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    hangup = getattr(signal, "SIGHUP", None)
    return tuple(
        number for number in numbers if number != hangup or signal.getsignal(number) != signal.SIG_IGN
    )


def say(line: str) -> None:
    """One line on stdout, unwrapped and flushed. A reader that has gone away does not stop a peer."""
    try:
        print(line, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open to the end


def invitation(addresses: Sequence[str], *, private: bool) -> str:
    """The command that lets another machine join: by an address that it can reach, if there is one."""
    reachable = [address for address in addresses if not is_loopback(address)]
    return (
        f"molink-peer join --initial-peers {(reachable or list(addresses))[0]}{_key_option(private=private)}"
    )


def _key_option(*, private: bool) -> str:
    return f" --swarm-key {KEY_PLACEHOLDER}" if private else ""


async def run_until_left(
    peer: RunningPeer,
    state_dir: Path,
    progress: ProgressLines,
    *,
    private: bool,
    view: PeerDisplay = NO_VIEW,
) -> None:
    """Runs the peer until it has left: by signal, by its control endpoint, or because it failed. `view` is drawn while
    it serves.

    Ends the process right here if it was told to leave at once, or if a thread still loads weights: that must not hold
    up the volunteer.
    """

    def on_ready(ready: RunningPeer) -> None:
        progress.stop()
        invite = invitation(ready.addresses, private=private) if ready.addresses else ""
        if ready.addresses:
            say(f"Invite others: {invite}")
            say(f"Ask it: molink chat --initial-peers {ready.addresses[0]}{_key_option(private=private)}")
        say("ready")
        view.end()  # of the model before, if its operator has ordered another
        view.begin(ready.own_status, invite)

    def leave(at_once: bool) -> None:
        if at_once or not peer.serves:
            interrupts.leave_at_once()
        else:
            peer.leave()

    interrupts = Interrupts(peer, view.end)
    forced = False
    try:
        async with ControlEndpoint(state_dir, leave, peer.status):
            life = asyncio.create_task(peer.run(on_ready), name="peer")
            with interrupts.caught(life):
                await life
    except asyncio.CancelledError:
        forced = True
        raise
    finally:
        view.end()
        progress.stop()
        if interrupts.at_once:
            logging.shutdown()
            os._exit(EXIT_INTERRUPTED if forced else 0)
    say("Left the swarm")
    if peer.loads:
        logging.shutdown()
        os._exit(0)
