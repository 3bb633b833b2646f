"""A head that sends what nobody asked for, or blames who did nothing, is left; the generation has the right tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.attackers.bystander import TOKENS
from support.attackers.liars import AnswerStart, Liar, announced, claim, until_known, view_of
from support.pairwise import usually
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.anyio]

PROMPT = "ROMEO:"
FRONT = Span(0, 6)
DEADLINE_S = 120.0
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


async def a_full_flood_of_the_past(_: Liar, link: Link, start: pb.Start) -> None:
    await send(link, [_token(start, -1, token_id=5) for _ in range(FULL_FLOOD)])


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
SOME = (tokens_of_the_past, an_end_before_the_end, an_honest_hop_is_blamed)
"""Lies of tokens, of ends, and of others. What a token may be is tested in `test_token_rules`, and how long silence is
waited for in `test_patience`."""
FULL_LIES = (a_full_flood_of_the_past, *LIES[1:])


async def generate_beside(attacked: LocalSwarm, lie: AnswerStart, liars: int = 1) -> tuple[Generation, int]:
    """A generation whose first head lies, in a swarm with others, and how often liars were started on it.

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
                with liars_first(client, heads, like.peer_id):
                    async with asyncio.timeout(DEADLINE_S * max(1, liars / 2)):
                        generation = await generate(client, PROMPT, TOKENS)
        finally:
            for head in heads:
                await head.__aexit__(None, None, None)
    return generation, sum(len(head.starts) for head in heads)


@contextmanager
def liars_first(client: AsyncSwarm, liars: Sequence[Liar], honest: str) -> Iterator[None]:
    """The client knows nothing of the honest head until a liar has been started: which of them is faster it would
    measure."""
    connection = client.connection
    whole_view = connection.snapshot

    def narrow_view(model_hash: str | None = None) -> tuple[PeerView, ...]:
        is_over = any(liar.starts for liar in liars)
        return tuple(view for view in whole_view(model_hash) if is_over or view.peer_id != honest)

    connection.snapshot = narrow_view  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.snapshot  # type: ignore[method-assign]


def require_right(generation: Generation, references: References) -> None:
    folder = bundled_folder()
    assert generation.token_ids == references.greedy(folder, references.ids(folder, PROMPT), TOKENS)


@pytest.mark.parametrize("lie", usually(SOME, LIES), ids=lambda lie: lie.__name__)
async def test_a_lying_head_is_left_and_the_tokens_are_right(
    lie: AnswerStart, attacked: LocalSwarm, references: References
) -> None:
    generation, starts = await generate_beside(attacked, lie)
    require_right(generation, references)
    assert 1 <= starts <= 3
    assert generation.epochs >= 2, "on a busy machine an honest circuit may be left besides"


@pytest.mark.full
async def test_of_a_flood_no_more_tokens_are_taken_than_were_asked_for(attacked: LocalSwarm) -> None:
    """Tokens that could be are taken for what they say: who falsifies them is not found out by this."""
    generation, starts = await generate_beside(attacked, a_flood_of_tokens_that_could_be)
    assert starts >= 1
    assert len(generation.token_ids) == TOKENS


@pytest.mark.attack
@pytest.mark.parametrize("lie", FULL_LIES, ids=lambda lie: lie.__name__)
async def test_one_liar_after_the_other_is_left(
    lie: AnswerStart, attacked: LocalSwarm, references: References
) -> None:
    generation, starts = await generate_beside(attacked, lie, LIARS)
    require_right(generation, references)
    assert starts >= 1
