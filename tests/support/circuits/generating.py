"""A generation over peers that are scripted, driven token by token."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

from support.links.data_plane import SPEC, until
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest, begin_at_once
from molink.client.epochs.kept_leases import PlannedRoute
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import SamplingParams, Span

PROMPT = [5, 6, 7]
LOW, HIGH = Span(0, 3), Span(3, 6)


class Generating:
    """A session over fakes: `low` and `high` are its first circuit, `spare` could replace one of them."""

    def __init__(
        self,
        *,
        spare: bool | Span = False,
        stands: Callable[[PlannedRoute], Awaitable[None]] = begin_at_once,
        **params: object,
    ) -> None:
        """`spare`: of which span; True: that of `high`. `stands`: what the session waits for before it begins."""
        self.report: Callable[[str], None] = lambda _: None
        self.low, self.high = FakePeer(LOW), FakePeer(HIGH)
        self.spare = FakePeer(spare if isinstance(spare, Span) else HIGH, layer_ms=5.0)
        self.connection = FakeConnection(self.low, self.high, *([self.spare] if spare else []))
        connection = cast("SwarmConnection", self.connection)
        sampling = SamplingParams(**{"max_new_tokens": 8, **params})  # type: ignore[arg-type]
        asked = SessionRequest(PROMPT, sampling, stands=stands)
        self.session = ClientSession(CircuitBuilder(connection, SPEC), asked, self._told)

    def _told(self, line: str) -> None:
        self.report(line)

    @property
    def epoch(self) -> int:
        return self.low.starts[-1].epoch

    def token(
        self,
        position: int,
        token_id: int,
        *,
        finish: int = 0,
        epoch: int | None = None,
        sender: FakePeer | None = None,
    ) -> None:
        """A token comes from the head, `low` unless another is named."""
        self.session.on_tokens(
            (sender or self.low).peer_id,
            pb.Token(
                position=position,
                token_id=token_id,
                finish=finish,  # type: ignore[arg-type]
                epoch=self.epoch if epoch is None else epoch,
            ),
        )

    def lose(
        self, peer: FakePeer, *, epoch: int | None = None, code: str = "lost", sender: FakePeer | None = None
    ) -> None:
        """The head, or another peer, says that a hop is lost."""
        epoch = self.epoch if epoch is None else epoch
        failed = pb.Failed(epoch=epoch, peer_id=peer.peer_id, code=code, detail="it is gone")
        self.session.on_failed((sender or self.low).peer_id, failed)

    async def started(self, times: int = 1) -> None:
        await until(lambda: len(self.low.starts) == times)


async def rest(tokens: AsyncGenerator[pb.Token, None]) -> list[int]:
    return [token.token_id async for token in tokens]
