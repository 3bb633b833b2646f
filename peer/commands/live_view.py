"""A live view of a peer that serves, for its owner at a terminal: how it is reached, what it holds and does."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from molink.peer.commands.overview import (
    free_memory,
    mapping,
    number,
    plain_markup,
    reached,
    spans_text,
    text,
)
from molink.peer.daemon.running import NO_VIEW, PeerDisplay
from molink.peer.device.temperature import read_processor_c

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

DRAWN_EVERY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PeerLook:
    """One look at a peer."""

    status: Mapping[str, object]
    """What it says of itself alone (`Peer.own_status`)."""
    at_s: float
    celsius: float | None = None
    """Of the processors; None: not known."""

    @property
    def tokens(self) -> float:
        return number(self.status.get("computed_tokens"))


class LiveView:
    """Live view: drawn between `begin` and `end`, below whatever else is printed meanwhile."""

    def __init__(
        self,
        out: "Console",
        read_celsius: Callable[[], float | None] = read_processor_c,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._read_celsius = read_celsius
        self._clock = clock
        self._live: Live | None = None
        self._drawing: asyncio.Task[None] | None = None

    def begin(self, describe: Callable[[], Mapping[str, object]], invitation: str) -> None:
        """Draws what `describe` says, once a second, until `end`. Call it on the loop."""
        from rich.live import Live

        self._live = Live(console=self._out, auto_refresh=False, transient=True)
        self._live.start()
        self._drawing = asyncio.create_task(self._keep(describe, invitation), name="draw the live view")

    def end(self) -> None:
        """The view goes away; what was printed stays. May be called again."""
        if self._drawing is not None:
            self._drawing.cancel()
            self._drawing = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    async def _keep(self, describe: Callable[[], Mapping[str, object]], invitation: str) -> None:
        """A terminal that takes nothing holds up a thread, and not the peer."""
        before: PeerLook | None = None
        while self._live is not None:
            status = describe()
            celsius = await asyncio.to_thread(self._read_celsius)
            look = PeerLook(status, self._clock(), celsius)
            await asyncio.to_thread(self._draw, self._live, drawn(look, before, invitation))
            before = look
            await asyncio.sleep(DRAWN_EVERY_S)

    def _draw(self, live: "Live", view: "RenderableType") -> None:
        if self._live is live:
            live.update(view, refresh=True)


def rows(look: PeerLook, before: PeerLook | None, invitation: str) -> list[tuple[str, str]]:
    """What the view says, by its headings. `before`: the look before this one, from which rates are told."""
    status = look.status
    sessions = f"{number(status.get('sessions')):g}"
    if status.get("paused"):
        sessions += f", paused: {text(status.get('paused'))}"
    elif status.get("draining"):
        sessions += ", takes nothing new"
    tokens = f"{look.tokens:,.0f}"
    if before is not None and look.at_s > before.at_s:
        tokens += f", {(look.tokens - before.tokens) / (look.at_s - before.at_s):,.1f} a second"
    found = [
        ("reached", reached(mapping(status.get("reach")))),
        ("model", f"{text(status.get('model'))} in {text(status.get('dtype'))}"),
        ("layers", spans_text(status.get("spans")) or "none yet"),
        ("sessions", sessions),
        ("tokens served", tokens),
        ("memory", free_memory(mapping(status.get("memory")))),
    ]
    if look.celsius is not None:
        found.append(("processors", f"{look.celsius:.0f} °C"))
    if invitation:
        found.append(("invite others", invitation))
    return found


def drawn(look: PeerLook, before: PeerLook | None, invitation: str) -> "RenderableType":
    """The view as a table of two columns in a frame."""
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, value in rows(look, before, invitation):
        table.add_row(heading, plain_markup(value))
    name = plain_markup(text(look.status.get("name")) or "molink-peer")
    return Panel(table, title=name, subtitle="Ctrl-C leaves", title_align="left", subtitle_align="right")


def terminal_view() -> PeerDisplay:
    """A view on stdout, which is a terminal; none on one that cannot go back up."""
    from rich.console import Console

    out = Console(highlight=False)
    return NO_VIEW if out.is_dumb_terminal else LiveView(out)
