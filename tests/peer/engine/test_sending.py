"""What a hop has to send fits into messages, whatever came together."""

from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC

from molink.peer.engine.arrivals import MOST_TOKEN_BYTES
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sending import FrameSender, StepToken
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import encode

LARGEST = MOST_TOKEN_BYTES - 64


class Posted:
    """A link that takes all messages that can be encoded."""

    def __init__(self) -> None:
        self.messages: list[pb.Tokens] = []

    def post(self, message: pb.Tokens, **_: object) -> bool:
        encode(message)
        self.messages.append(message)
        return True


@given(
    st.lists(st.tuples(st.sampled_from([0, 40, 300_000, LARGEST]), st.integers(1, 3)), min_size=1, max_size=6)
)
def test_tokens_of_one_step_stay_together_and_all_that_come_together_are_sent(
    steps: list[tuple[int, int]],
) -> None:
    link = Posted()
    links = SimpleNamespace(find=lambda _: link)
    sender = FrameSender(SPEC, cast("Links", links), cast("PeerMetrics", None))
    tokens = [
        pb.Token(session=bytes([number]), step=4, position=at, prompt_logprobs=bytes(0 if at else size))
        for number, (size, count) in enumerate(steps)
        for at in range(count)
    ]
    given_tokens = [cast("StepToken", (None, 0, 0, False, None, token)) for token in tokens]
    assert sender.send_tokens("head", given_tokens)
    assert [token for message in link.messages for token in message.tokens] == tokens
    for number in range(len(steps)):
        assert (
            sum(any(token.session == bytes([number]) for token in one.tokens) for one in link.messages) == 1
        )
