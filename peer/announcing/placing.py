"""Which layers this peer holds of its own accord: those that help most when it joins, and others when that pays.

Peers that choose at the same moment would choose the same. So each says first what it is going to load, waits until
the others' word has come, and acts only if it would still choose so; of two whose words cross, the one of smaller id
goes ahead.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from molink.dht.errors import BootstrapUnreachable
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerView
from molink.peer.announcing.announcer import Announcer
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.serving.layer_loader import LayerLoader
from molink.routing.placement.placement import JoiningMachine, JoinPreview, preview_join
from molink.routing.placement.rebalancing import LOOK_EVERY_S, SETTLE_S, Move, next_move, without_late_claims
from molink.routing.snapshot import Snapshot
from molink.shards.errors import WeightsError
from molink.shards.spec import ModelSpec, Span

CHOICES = 5
"""Times that a joining peer chooses, at most. If the swarm still changes then, a later move makes up for it."""
_log = logging.getLogger(__name__)


class Placing:
    """Chooses a peer's layers and has them loaded. Only for a peer whose owner has not chosen."""

    def __init__(
        self,
        discovery: Discovery,
        spec: ModelSpec,
        leases: LeaseBook,
        loader: LayerLoader,
        announcer: Announcer,
    ) -> None:
        self._discovery = discovery
        self._spec = spec
        self._leases = leases
        self._loader = loader
        self._announcer = announcer

    async def join(
        self, machine: Callable[[], JoiningMachine], choosing: Callable[[JoinPreview], None]
    ) -> None:
        """Loads the span that helps the swarm most, as `preview_join` sees it; first tells `choosing` which and why.

        Raises:
            WeightsError: the weights are missing, damaged or not this model's.
        """
        views = self._others()
        preview = await self._preview(views, machine())
        for _ in range(CHOICES):
            if preview.span is None:
                break
            views = await self._claim(views, load=(preview.span,))
            span, preview = preview.span, await self._preview(views, machine())
            if preview.span == span:
                break
        choosing(preview)
        if preview.span is not None:
            await self._load((preview.span,))
        self._announcer.forget_intent()

    async def keep_placed(self) -> None:
        """Moves whenever that pays, until cancelled."""
        held_since_s = time.time()
        while True:
            await asyncio.sleep(random.uniform(*LOOK_EVERY_S))
            if self._leases.draining or self._leases.loading:
                continue
            try:
                if await self._move_if_it_pays(held_since_s):
                    held_since_s = time.time()
            except (WeightsError, OSError, MemoryError, RuntimeError, ValueError) as error:
                held_since_s = time.time()
                _log.error("the layers of a move could not be loaded: %s", error)
            finally:
                self._announcer.forget_intent()

    async def _move_if_it_pays(self, held_since_s: float) -> bool:
        now_s = time.time()
        views = self._others()
        move = await self._next_move(views, held_since_s, now_s)
        if move is None:
            return False
        views = await self._claim(views, move.load, move.drop)
        again = await self._next_move(views, held_since_s, now_s)
        # while something loads, dropping would have to wait, and by then be decided anew
        if again is None or self._leases.loading or (again.load, again.drop) != (move.load, move.drop):
            _log.info("stays as it is: the swarm has changed, or a session has come")
            return False
        try:
            await self._loader.drop(move.drop)
        except ValueError as error:  # a session has come in the last moment
            _log.info("stays as it is: %s", error)
            return False
        _log.info("moves: drops %s, loads %s", _text(move.drop), _text(move.load))
        await self._load(move.load)
        return True

    async def _claim(
        self, seen: Sequence[PeerView], load: tuple[Span, ...], drop: tuple[Span, ...] = ()
    ) -> tuple[PeerView, ...]:
        """Says what this peer is going to do, and returns the others as they are when they have heard it."""
        await self._announcer.intend(load, drop)
        if seen:
            await asyncio.sleep(SETTLE_S)
            with suppress(BootstrapUnreachable, TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._discovery.refresh()
        return without_late_claims(self._others(), seen, self._announcer.facts.peer_id)

    async def _load(self, spans: tuple[Span, ...]) -> None:
        """Unless sessions have taken the memory meanwhile."""
        for span in spans:
            answer = self._leases.preload(span, asyncio.get_running_loop().time())
            if isinstance(answer, Refused):
                _log.warning("layers %s are not loaded: %s", span, answer.detail)
            else:
                await self._loader.load(span)

    async def _preview(self, others: Sequence[PeerView], machine: JoiningMachine) -> JoinPreview:
        return await asyncio.to_thread(preview_join, Snapshot(tuple(others), self._spec), machine)

    async def _next_move(self, others: Sequence[PeerView], held_since_s: float, now_s: float) -> Move | None:
        own = self._announcer.own_view()
        leased = tuple(lease.span for lease in self._leases.leases)
        snapshot = Snapshot((*others, own), self._spec)
        return await asyncio.to_thread(next_move, snapshot, own.peer_id, held_since_s, now_s, leased)

    def _others(self) -> tuple[PeerView, ...]:
        """The model's other peers: what this very peer said before it was started again binds nobody."""
        own = self._announcer.facts.peer_id
        return tuple(view for view in self._discovery.snapshot(self._spec.model_hash) if view.peer_id != own)


def _text(spans: tuple[Span, ...]) -> str:
    return ", ".join(map(str, spans)) or "nothing"
