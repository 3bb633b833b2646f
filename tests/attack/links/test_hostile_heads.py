"""A head that sends what nobody asked for, or blames who did nothing, is left; the generation has the right tokens."""

import asyncio
import sys

import pytest
from support.attackers.bystander import TOKENS
from support.attackers.liars import AnswerStart, Liar, announced, claim, until_known, view_of
from support.pairwise import usually
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.epochs import patience
from molink.client.local.local_swarm import LocalSwarm
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.anyio]

PROMPT = "ROMEO:"
FRONT = Span(0, 6)
DEADLINE_S = 30.0
"""For a liar or two. A circuit that stands still does not say who holds it up: each costs two circuits at most."""
FLOOD = 20_000
FULL_FLOOD = 417_200
LIARS = 4


def _token(start: pb.Start, ahead: int = 0, **fields: object) -> pb.Token:
    position = len(start.token_ids) + ahead
    return pb.Token(session=start.session, epoch=start.epoch, position=position, **fields)  # type: ignore[arg-type]


async def send(link: Link, tokens: list[pb.Token]) -> None:
    """In frames of 500, as fast as the link takes them, until it is closed."""
    waiting = list(tokens)
    while waiting and link.closed_because is None:
        if link.post(pb.Tokens(tokens=waiting[:500])):
            del waiting[:500]
        await asyncio.sleep(0)


async def a_flood_of_tokens_that_could_be(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, ahead, token_id=5) for ahead in range(FLOOD)])


async def tokens_of_the_past(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, -1, token_id=5) for _ in range(FLOOD)])


async def an_unknown_id(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, token_id=2**32 - 1)])


async def a_position_far_ahead(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, 2**31, token_id=5)])


async def an_end_before_the_end(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, token_id=5, finish=pb.LENGTH)])


async def a_logprob_that_nobody_asked_for(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, token_id=5, logprob=float("nan"))])


async def an_honest_hop_is_blamed(liar: Liar, link: Link, start: pb.Start) -> None:
    hops = liar.descriptors[start.session].hops
    blamed = next(hop.peer_id for hop in hops if hop.peer_id != liar.peer_id)
    link.post(pb.Failed(session=start.session, epoch=start.epoch, peer_id=blamed, code="lost"))


async def nothing_at_all(_: Liar, __: Link, ___: pb.Start) -> None:
    """The circuit stands still."""


LIES = (
    tokens_of_the_past,
    an_unknown_id,
    a_position_far_ahead,
    an_end_before_the_end,
    a_logprob_that_nobody_asked_for,
    an_honest_hop_is_blamed,
    nothing_at_all,
)
SOME = (tokens_of_the_past, an_end_before_the_end, an_honest_hop_is_blamed, nothing_at_all)
"""Lies of tokens, of ends, and of others, and silence. What a token may be is tested in `test_token_rules`."""


async def generate_beside(attacked: LocalSwarm, lie: AnswerStart, liars: int = 1) -> tuple[Generation, int]:
    """A generation in a swarm whose best heads lie, and how often they were started on it.

    The client has the model's tokenizer: whom it fetched that from would be nearer than who has yet to be measured.
    """
    async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as client:
        like, tails = view_of(client, "front"), (view_of(client, "back").peer_id,)
        heads = [Liar(lie) for _ in range(liars)]
        for head in heads:
            await head.__aenter__()
        try:
            claims = [
                claim(like, head.identity, head.address, FRONT, certificate=head.certificate.der, near=tails)
                for head in heads
            ]
            async with announced(attacked.addresses, claims):
                await until_known(client, [head.peer_id for head in heads])
                async with asyncio.timeout(DEADLINE_S * max(1, liars / 2)):
                    generation = await generate(client, PROMPT, TOKENS)
        finally:
            for head in heads:
                await head.__aexit__(None, None, None)
    return generation, sum(len(head.starts) for head in heads)


def require_right(generation: Generation, references: References) -> None:
    folder = bundled_folder()
    assert generation.token_ids == references.greedy(folder, references.ids(folder, PROMPT), TOKENS)


@pytest.mark.parametrize("lie", usually(SOME, LIES), ids=lambda lie: lie.__name__)
async def test_a_lying_head_is_left_and_the_tokens_are_right(
    lie: AnswerStart, attacked: LocalSwarm, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lie is nothing_at_all:
        monkeypatch.setattr(patience, "LEAST_FIRST_S", 3.0)
    generation, starts = await generate_beside(attacked, lie)
    require_right(generation, references)
    assert 1 <= starts <= 3
    assert generation.epochs <= 4


@pytest.mark.full
async def test_of_a_flood_no_more_tokens_are_taken_than_were_asked_for(attacked: LocalSwarm) -> None:
    """Tokens that could be are taken for what they say: who falsifies them is not found out by this."""
    generation, starts = await generate_beside(attacked, a_flood_of_tokens_that_could_be)
    assert starts == 1
    assert len(generation.token_ids) == TOKENS
    assert 2 <= generation.epochs <= 3


@pytest.mark.attack
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_one_liar_after_the_other_is_left(
    lie: AnswerStart, attacked: LocalSwarm, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LEAST_FIRST_S", 4.0)
    monkeypatch.setattr(sys.modules[__name__], "FLOOD", FULL_FLOOD)
    generation, starts = await generate_beside(attacked, lie, LIARS)
    require_right(generation, references)
    assert starts >= 1
