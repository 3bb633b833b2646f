"""Generations over a circuit of serving peers in this process, on real engines behind real links."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from support.links.data_plane import DEADLINE_S, describe, soon
from support.swarms.served_peer import PATIENT_LEASES, Served, once_ready, served

from molink.peer.engine.guessing import GuessesOf
from molink.peer.memory.lease_table import LeaseTimes
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.prefill_chunks import Cut, chunk_lengths
from molink.shards.kv.prefix import NAME_BYTES, block_names, common_position
from molink.shards.spec import Span


@dataclass(slots=True)
class ServedCircuit:
    """Peers that hold the model between them, and the first one's client, linked to all."""

    peers: list[Served]
    spans: list[Span]
    links: list[Link]
    held: dict[int, list[int]] = field(default_factory=dict)
    """By session: how many tokens of its prompt's beginning each hop held when it was ready."""
    least: dict[int, list[int]] = field(default_factory=dict)
    """By session: behind how many of them each hop can begin at least."""
    speculates: bool = False
    """Whether its sessions' head may guess."""
    sampling: pb.Sampling = field(default_factory=pb.Sampling)
    """What sessions ask for beside what they are asked to have."""
    codec: str = ""
    """How activations travel."""

    async def reserve(
        self, session: int, prompt_tokens: int, new_tokens: int, prefix_blocks: bytes = b""
    ) -> pb.SessionDescriptor:
        """A session that is ready at every hop."""
        hops = [peer.hop(span) for peer, span in zip(self.peers, self.spans, strict=True)]
        descriptor = describe(hops, session=session, spec=self.peers[0].spec)
        descriptor.prompt_tokens, descriptor.capacity_tokens = prompt_tokens, prompt_tokens + new_tokens + 1
        descriptor.sampling.max_new_tokens = new_tokens
        descriptor.prefix_blocks = prefix_blocks
        descriptor.sampling.ClearField("stop_token_ids")
        descriptor.sampling.MergeFrom(self.sampling)
        descriptor.speculates, descriptor.activation_codec = self.speculates, self.codec
        await self.lease(descriptor, session)
        return descriptor

    async def lease(self, descriptor: pb.SessionDescriptor, session: int = 1) -> None:
        """Every hop grants the session that is described so, and is ready."""
        self.held[session], self.least[session] = [], []
        for hop, link in enumerate(self.links):
            reserving = pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=hop))
            response, _ = await link.request(reserving, DEADLINE_S)
            while response.refusal.code == "busy":  # by a client that asks as often as this machine lets it
                await asyncio.sleep(response.refusal.retry_after_ms / 1000)
                response, _ = await link.request(reserving, DEADLINE_S)
            assert response.HasField("reserved"), response
        for link in self.links:
            response = await once_ready(link, descriptor)
            assert response.readiness.ready, response
            readiness = response.readiness
            self.held[session].append(readiness.held_tokens)
            self.least[session].append(readiness.least_held_tokens)

    async def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, prefix_key: bytes | None = None
    ) -> list[list[int]]:
        """The tokens of generations that start together, as sessions 1, 2, ...; with a key, they share what they can of
        their prompts."""
        descriptors = []
        for session, prompt in enumerate(prompts, 1):
            names = block_names(prompt[:-1], prefix_key) if prefix_key is not None else ()
            descriptors.append(await self.reserve(session, len(prompt), new_tokens, b"".join(names)))
        for session, (descriptor, prompt) in enumerate(zip(descriptors, prompts, strict=True), 1):
            start = pb.Start(
                session=descriptor.session,
                epoch=1,
                token_ids=list(prompt),
                position=common_position(list(zip(self.least[session], self.held[session], strict=True))),
            )
            assert self.links[0].post(start)
        got: dict[bytes, list[int]] = {descriptor.session: [] for descriptor in descriptors}
        while any(len(tokens) < new_tokens for tokens in got.values()):
            _, frame = await soon(self.peers[0].client.handler.frames.get())
            for token in frame.header.tokens:
                got[token.session].append(token.token_id)
        for descriptor, prompt in zip(descriptors, prompts, strict=True):
            names = block_names([*prompt, *got[descriptor.session]], prefix_key or b"")
            further = names[len(descriptor.prefix_blocks) // NAME_BYTES :] if prefix_key is not None else ()
            release = pb.Release(
                session=descriptor.session,
                epoch=1,
                further_blocks=b"".join(further),
                valid_tokens=len(prompt) + len(got[descriptor.session]) - 1,
            )
            await asyncio.gather(
                *(link.request(pb.Request(release=release), DEADLINE_S) for link in self.links)
            )
        return [got[descriptor.session] for descriptor in descriptors]


@asynccontextmanager
async def served_circuit(  # noqa: PLR0913 - what a test may say of a circuit, by name
    model: LocalModel,
    cuts: Sequence[int],
    *,
    kv_tokens: int,
    swap_bytes: int = 0,
    cut: Cut = chunk_lengths,
    settings: DataPlaneSettings = DataPlaneSettings(copies=True),  # noqa: B008 - it is frozen
    profile: Profile | None = None,
    guesses: GuessesOf | None = None,
    lease_times: LeaseTimes = PATIENT_LEASES,
) -> AsyncIterator[ServedCircuit]:
    """Peers of which each holds the layers between two of the cuts; that profile is what they know of their times."""
    async with AsyncExitStack() as stack:
        spans = [Span(*bounds) for bounds in pairwise((0, *cuts, model.spec.layers))]
        peers = [
            await stack.enter_async_context(
                served(
                    model,
                    kv_tokens=kv_tokens,
                    swap_bytes=swap_bytes,
                    span=span if swap_bytes else None,
                    step_times=profile and StepTimes(profile),
                    settings=replace(settings, cut=cut),
                    guesses=guesses,
                    lease_times=lease_times,
                )
            )
            for span in spans
        ]
        links = [await peers[0].client.links.to(peer.facts) for peer in peers]
        yield ServedCircuit(peers, spans, links, speculates=guesses is not None)
