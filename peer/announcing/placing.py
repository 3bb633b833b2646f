"""Drives `PlacementCore` with asyncio: which layers this peer holds of its own accord."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from molink.dht.errors import BootstrapUnreachable
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerView
from molink.peer.announcing import placement_core as core
from molink.peer.announcing.announcer import Announcer
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.serving.layer_loader import LayerLoader
from molink.routing.placement.placement import JoiningMachine, JoinPreview, preview_join
from molink.routing.placement.rebalancing import LOOK_EVERY_S, Move, next_move
from molink.routing.snapshot import Snapshot
from molink.shards.errors import WeightsError
from molink.shards.spec import ModelSpec, Span

_log = logging.getLogger(__name__)


class PlacementDriver:
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
        self._core = core.PlacementCore(announcer.facts.peer_id, held_since_s=time.monotonic())

    async def join(
        self, machine: Callable[[], JoiningMachine], choosing: Callable[[JoinPreview], None]
    ) -> None:
        """Loads the span that helps the swarm most, as `preview_join` sees it; first tells `choosing` which and why.

        Raises:
            WeightsError: the weights are missing, damaged or not this model's.
        """
        previews: list[JoinPreview] = []
        effect = await self._begin(core.Join(self._others()))
        while not isinstance(effect, core.Rest):
            if isinstance(effect, core.FindSpan):
                previews.append(await self._preview(effect.others, machine()))
                answer: core.Event = core.SpanFound(previews[-1].span)
            else:
                answer = await self._answered(effect)
            effect = await self._begin(answer, chosen=lambda: choosing(previews[-1]))

    async def keep_placed(self) -> None:
        """Moves whenever that pays, until cancelled."""
        effect: core.Effect = core.Rest(core.PlacementOutcome.STAYED)
        while True:
            try:
                effect = await self._begin(await self._answered(effect))
            except (WeightsError, OSError, MemoryError, RuntimeError, ValueError) as error:
                _log.error("the layers of a move could not be had: %s", error)
                effect = await self._begin(core.Failed())

    async def _begin(self, event: core.Event, chosen: Callable[[], None] = lambda: None) -> core.Effect:
        """Does what follows from the event up to the effect that is to be answered, and returns that one."""
        *told, effect = self._core.handle(event, time.monotonic())
        for one in told:
            if isinstance(one, core.Choose):
                chosen()
            elif isinstance(one, core.Claim):
                await self._announcer.claim(one)
        if effect == core.Rest(core.PlacementOutcome.CALLED_OFF):
            _log.info("stays as it is: the swarm has changed, or a session has come")
        return effect

    async def _answered(self, effect: core.Effect) -> core.Event:
        match effect:
            case core.Rest():
                await asyncio.sleep(random.uniform(*LOOK_EVERY_S))
                return core.ConsiderMove(
                    self._others(), busy=self._leases.gate.is_closed or bool(self._leases.loading)
                )
            case core.FindMove(others, held_s, looked_s):
                move = await self._next_move(others, held_s, looked_s)
                return core.MoveFound(move, loading=bool(self._leases.loading))
            case core.AwaitViews(wait_s):
                await self._await_views(wait_s)
                return core.ViewsAwaited(self._others())
            case core.FetchSpan(span):
                await self._loader.fetch(span)
                return core.SpanFetched()
            case core.DropSpans(spans):
                return core.SpansDropped(await self._drop(spans))
            case core.LoadSpan(span):
                await self._load(span)
                return core.SpanLoaded()
        raise TypeError(f"nobody answers {effect}")

    async def _await_views(self, wait_s: float) -> None:
        """Until what others say meanwhile is here, as a rule."""
        if wait_s > 0:
            await asyncio.sleep(wait_s)
            with suppress(BootstrapUnreachable, TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._discovery.refresh()

    async def _drop(self, spans: tuple[Span, ...]) -> bool:
        try:
            await self._loader.drop(spans)
        except ValueError as error:  # a session has come in the last moment
            _log.info("%s stays: %s", _text(spans), error)
            return False
        _log.info("moves: drops %s", _text(spans))
        return True

    async def _load(self, span: Span) -> None:
        """Unless sessions have taken the memory meanwhile."""
        answer = self._leases.preload(span, asyncio.get_running_loop().time())
        if isinstance(answer, Refused):
            _log.warning("layers %s are not loaded: %s", span, answer.detail)
        else:
            _log.info("loads %s of its own accord", span)
            await self._loader.load(span)

    async def _preview(self, others: Sequence[PeerView], machine: JoiningMachine) -> JoinPreview:
        return await asyncio.to_thread(preview_join, Snapshot(tuple(others), self._spec), machine)

    async def _next_move(self, others: Sequence[PeerView], held_s: float, looked_s: float) -> Move | None:
        own = self._announcer.own_view()
        leased = tuple(lease.span for lease in self._leases.leases)
        snapshot = Snapshot((*others, own), self._spec)
        now_s = time.time() - (
            time.monotonic() - looked_s
        )  # turns go by the time of day, which peers share roughly
        return await asyncio.to_thread(next_move, snapshot, own.peer_id, held_s, now_s, leased)

    def _others(self) -> tuple[PeerView, ...]:
        """The model's other peers: what this very peer said before it was started again binds nobody."""
        own = self._announcer.facts.peer_id
        return tuple(view for view in self._discovery.snapshot(self._spec.model_hash) if view.peer_id != own)


def _text(spans: tuple[Span, ...]) -> str:
    return ", ".join(map(str, spans)) or "nothing"
