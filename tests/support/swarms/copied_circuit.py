"""A circuit of serving peers whose hops have standbys, all in this process, on real engines behind real links."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from support.links.data_plane import DEADLINE_S, until
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import Served, served

from molink.dht.records.announcement import sign_facts
from molink.peer.engine.guessing import GuessesOf
from molink.peer.models.model import LocalModel
from molink.peer.serving.copying import Copying
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import CopyForm, computed_form
from molink.shards.spec import Span


@dataclass(slots=True)
class CopiedCircuit:
    """A circuit, and a standby for each hop, to which the circuit's client has links."""

    circuit: ServedCircuit
    standbys: list[Served]
    links: list[Link]

    async def keep(self, descriptor: pb.SessionDescriptor, *, computed: bool = False) -> list[pb.Response]:
        """Hops hear who their standbys are, and these are asked for copies, as keys and values or to be computed; what
        they answer."""
        for hop, standby in zip(descriptor.hops, self.standbys, strict=True):
            served_model = replace(standby.facts.model, model_hash=standby.spec.model_hash)
            hop.standby_facts = sign_facts(replace(standby.facts, model=served_model), standby.identity)
            form = computed_form(Span(hop.start, hop.stop)) if computed else CopyForm.KEYS_AND_VALUES
            hop.standby_form = pb.CopyForm.ValueType(form)
        for hop, link in enumerate(self.circuit.links):
            response = await ask(link, pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop)))
            assert response.HasField("reserved"), response
        return [
            await ask(link, pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop, copy=True)))
            for hop, link in enumerate(self.links)
        ]

    async def start(self, descriptor: pb.SessionDescriptor, prompt: Sequence[int], tokens: int) -> list[int]:
        """Starts it, and waits for so many tokens."""
        start = pb.Start(session=descriptor.session, epoch=descriptor.epoch, token_ids=prompt)
        assert self.circuit.links[0].post(start)
        return await self.tokens(tokens)

    async def tokens(self, count: int) -> list[int]:
        """The next tokens that the client gets."""
        found: list[int] = []
        while len(found) < count:
            async with asyncio.timeout(DEADLINE_S):
                _, frame = await self.circuit.peers[0].client.handler.frames.get()
            if isinstance(frame.header, pb.Tokens):
                found += [token.token_id for token in frame.header.tokens]
        return found

    async def copied(self, descriptor: pb.SessionDescriptor) -> None:
        """Returns when every standby has all that its hop has, and both know it."""
        await until(lambda: all(self._is_copied(descriptor, at) for at in range(len(self.standbys))))

    def content(self, descriptor: pb.SessionDescriptor, at: int) -> tuple[bytes, bytes]:
        """What the hop's cache and its copy hold."""
        session = self.circuit.peers[at].serving.sessions.get(descriptor.session, descriptor.epoch)
        assert session is not None
        assert session.cache is not None
        copy = self._copy(descriptor, at)
        assert copy is not None
        return bytes(session.cache.export(0, session.cache.certain_tokens)), bytes(
            copy.export(0, copy.length)
        )

    def _is_copied(self, descriptor: pb.SessionDescriptor, at: int) -> bool:
        session = self.circuit.peers[at].serving.sessions.get(descriptor.session, descriptor.epoch)
        copy = self._copy(descriptor, at)
        if session is None or session.cache is None or copy is None:
            return False
        is_known = not any(copying_of(self.circuit.peers[at]).sender.behind_tokens)
        return copy.length == session.cache.certain_tokens > 0 and is_known

    def _copy(self, descriptor: pb.SessionDescriptor, at: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
        kept = copying_of(self.standbys[at]).keeper.find(descriptor.session)
        return None if kept is None else kept.cache


def copying_of(peer: Served) -> Copying:
    assert peer.serving.copying is not None
    return peer.serving.copying


async def ask(link: Link, request: pb.Request) -> pb.Response:
    return (await link.request(request, DEADLINE_S))[0]


async def ask_until_ready(link: Link, request: pb.Request) -> pb.Response:
    """The answer once what is asked for is ready, or refused: as a client does, asks again until then."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            response = await ask(link, request)
            if response.readiness.ready or response.HasField("refusal"):
                return response


@asynccontextmanager
async def copied_circuit(
    model: LocalModel,
    cuts: Sequence[int],
    *,
    kv_tokens: int = 400,
    standby_tokens: int = 400,
    settings: DataPlaneSettings = DataPlaneSettings(copies=True),  # noqa: B008 - it is frozen
    guesses: GuessesOf | None = None,
) -> AsyncIterator[CopiedCircuit]:
    """Peers of which each holds the layers between two of the cuts, and as many others that hold all layers."""
    async with AsyncExitStack() as stack:
        circuit = await stack.enter_async_context(
            served_circuit(model, cuts, kv_tokens=kv_tokens, settings=settings, guesses=guesses)
        )
        standbys = [
            await stack.enter_async_context(
                served(model, kv_tokens=standby_tokens, settings=settings, guesses=guesses)
            )
            for _ in circuit.peers
        ]
        for standby, span in zip(standbys, circuit.spans, strict=True):
            now = asyncio.get_running_loop().time()
            assert standby.leases.preload(span, now) == (span,)
            await standby.serving.loader.load(span)
        client = circuit.peers[0].client
        frames = client.handler.frames  # Failed is in place here
        client.handler.on_frame = lambda link, frame: frames.put_nowait((link.peer_id, frame))  # type: ignore[method-assign]
        links = [await client.links.to(standby.facts) for standby in standbys]
        yield CopiedCircuit(circuit, standbys, links)
