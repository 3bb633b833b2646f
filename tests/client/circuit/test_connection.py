"""A client's connection tells each session who sent it what."""

from support.links.data_plane import End, asynchronous, soon, until

from molink.client.circuit.connection import SwarmConnection
from molink.peer.wire.protocol import molink_pb2 as pb

SESSION = b"s" * 16


class Sink:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []

    def on_tokens(self, sender: str, token: pb.Token) -> None:
        self.seen.append((sender, token.token_id))

    def on_failed(self, sender: str, failed: pb.Failed) -> None:
        self.seen.append((sender, failed.code))

    def on_leaving(self, sender: str, leaving: pb.Leaving) -> None:
        self.seen.append((sender, leaving.reason))

    def on_link_closed(self, peer_id: str, reason: str) -> None:
        self.seen.append((peer_id, reason))


@asynchronous
async def test_a_session_learns_over_whose_link_a_frame_came() -> None:
    connection, sink = SwarmConnection([], None), Sink()
    connection.register(SESSION, sink)
    async with connection.links, End() as one, End() as other:
        for end in (one, other):
            await soon(connection.links.to(end.facts))
            await until(lambda end=end: bool(end.links.all()))
        (back,), (other_back,) = one.links.all(), other.links.all()
        back.post(pb.Tokens(tokens=[pb.Token(session=SESSION, token_id=7), pb.Token(session=b"another")]))
        await until(lambda: len(sink.seen) == 1)
        other_back.post(pb.Failed(session=SESSION, code="lost"))
        await until(lambda: len(sink.seen) == 2)
        assert sink.seen == [(one.peer_id, 7), (other.peer_id, "lost")]
        connection.unregister(SESSION)


@asynchronous
async def test_a_frame_that_no_client_gets_ends_the_link_it_came_over() -> None:
    connection, sink = SwarmConnection([], None), Sink()
    connection.register(SESSION, sink)
    async with connection.links, End() as end:
        await soon(connection.links.to(end.facts))
        await until(lambda: bool(end.links.all()))
        end.links.all()[0].post(pb.Start(session=SESSION))
        await until(lambda: len(sink.seen) == 1)
        peer_id, reason = sink.seen[0]
        assert peer_id == end.peer_id
        assert "protocol error" in str(reason)
