"""Prompts are cut to the longest step that every hop of the circuit has announced, and longer ones are refused."""

from dataclasses import replace

import pytest
from support.links.data_plane import End, asynchronous, describe, hop_of, soon
from support.swarms.served_peer import HIGH, LOW, Served, failures_told, model, served

from molink.peer.models.model import LocalModel
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.prefill_chunks import equal_chunks

__all__ = ["model"]
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13)


async def formed(peer: Served, neighbour: End, *, head: bool, step_tokens: int = 512) -> pb.SessionDescriptor:
    """A ready session in which the peer is the head or the tail; the neighbour announces that longest step."""
    facts = replace(neighbour.facts, step_tokens=step_tokens)
    other = hop_of(neighbour.identity, HIGH if head else LOW, facts)
    hops = [peer.hop(LOW), other] if head else [other, peer.hop(HIGH)]
    asked = describe(hops, spec=peer.spec)
    answer = await peer.reserve(asked, 0 if head else 1)
    assert answer.HasField("reserved"), answer
    assert (await peer.ready(asked)).readiness.ready
    await neighbour.linked(peer.identity.peer_id)
    return asked


@pytest.mark.parametrize(("announced", "chunks"), [(8, [3, 3, 3]), (100, [9])])
@asynchronous
async def test_a_head_cuts_prompts_to_what_the_next_hop_takes(
    model: LocalModel, announced: int, chunks: list[int]
) -> None:
    limits = BatchLimits(max_tokens=100, max_sessions=4)
    async with (
        served(model, settings=DataPlaneSettings(limits=limits, cut=equal_chunks(100))) as peer,
        End() as tail,
    ):
        asked = await formed(peer, tail, head=True, step_tokens=announced)
        assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=PROMPT))
        rows: list[int] = []
        while sum(rows) < len(PROMPT):
            _, frame = await soon(tail.handler.frames.get())
            assert isinstance(frame.header, pb.Activations)
            rows += [row.rows for row in frame.header.rows]
        assert rows == chunks


@pytest.mark.parametrize(("rows", "refused"), [(12, False), (13, True)])
@asynchronous
async def test_a_hop_takes_steps_as_long_as_it_announces_and_no_longer(
    model: LocalModel, rows: int, refused: bool
) -> None:
    async with (
        served(model, settings=DataPlaneSettings(limits=BatchLimits(max_tokens=12, max_sessions=4))) as peer,
        End() as head,
    ):
        failures = failures_told(peer)
        asked = await formed(peer, head, head=False)
        link = head.links.find(peer.identity.peer_id)
        assert link is not None
        row = pb.ActivationRow(session=asked.session, epoch=1, step=0, rows=rows, sample=True, prefill=True)
        sent = pb.Activations(rows=[row], hidden_size=peer.spec.hidden_size, dtype="float32")
        assert link.post(sent, bytes(rows * peer.spec.hidden_size * 4))
        if refused:
            failed = await soon(failures.get())
            assert (failed.peer_id, failed.code) == (head.peer_id, "protocol")
        else:
            _, frame = await soon(head.handler.frames.get())
            assert isinstance(frame.header, pb.Tokens)
            assert failures.empty()
