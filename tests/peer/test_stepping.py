"""What steps together: sessions whose tokens arrive together start their next steps together."""

from data_plane import End, asynchronous, describe, hop_of, soon
from served_peer import HIGH, LOW, model, one_thread, served

from molink.peer.model import LocalModel
from molink.peer.protocol import molink_pb2 as pb

__all__ = ["model", "one_thread"]

SESSIONS = (1, 2, 3)


@asynchronous
async def test_sessions_whose_tokens_come_in_one_frame_take_their_next_step_together(
    model: LocalModel,
) -> None:
    async with served(model) as peer, End() as tail:
        hops = [peer.hop(LOW), hop_of(tail.identity, HIGH, tail.facts)]
        for session in SESSIONS:
            asked = describe(hops, session=session, spec=peer.spec)
            assert (await peer.reserve(asked)).HasField("reserved")
            assert (await peer.ready(asked)).readiness.ready
            assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        prefilled = 0
        while prefilled < len(SESSIONS):
            _, frame = await soon(tail.handler.frames.get())
            prefilled += len(frame.header.rows)
        tokens = [
            pb.Token(session=bytes([session]) * 16, epoch=1, step=0, position=5, token_id=3)
            for session in SESSIONS
        ]
        link = tail.links.find(peer.identity.peer_id)
        assert link is not None
        assert link.post(pb.Tokens(tokens=tokens))
        _, frame = await soon(tail.handler.frames.get())
        assert [(row.session[0], row.step) for row in frame.header.rows] == [(one, 1) for one in SESSIONS]
