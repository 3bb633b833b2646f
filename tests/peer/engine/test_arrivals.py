"""What is kept of rows that arrive, beside what layers compute with; and that what leaves fits into messages."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC

from molink.peer.engine.arrivals import MOST_TOKEN_BYTES, of_activations, read_activations
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sending import FrameSender, StepToken
from molink.peer.hop.events import RowsArrived
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import decode, encode
from molink.routing.cost.pipeline import COST
from molink.shards import codec
from molink.shards.spec import ModelSpec

ROWS, WIDTH = 40, 1024


def spec() -> ModelSpec:
    return ModelSpec(
        model_hash="0" * 64, content_hash="0" * 64, name="none", architecture="llama", layers=4, hidden_size=WIDTH,
        vocabulary_size=64, context_length=512, dtype="float32", quantization="none", layer_bytes=(1,) * 4,
        embed_bytes=1, head_bytes=1, kv_bytes_per_token=(1,) * 4, stop_token_ids=(),
    )  # fmt: skip


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize("header_bytes", range(4))
def test_what_is_logged_stays_as_it_came_whatever_layers_write_over_their_inputs(
    sessions: int, header_bytes: int
) -> None:
    """Received messages lie in memory that can be written to, anywhere in it."""
    log = InputLogs(1 << 30).open("float32", 4 * WIDTH)
    found = SimpleNamespace(
        ended=False,
        inputs=log,
        is_head=False,
        previous_peer_id="other",
        receives_in="float32",
        cache=object(),
        place=SimpleNamespace(hop=1),
    )
    rows = torch.randn(sessions * ROWS, WIDTH)
    header = pb.Activations(hidden_size=WIDTH, dtype="float32")
    for place in range(sessions):
        session = bytes([place]) * (1 + header_bytes)
        header.rows.append(pb.ActivationRow(session=session, step=1, rows=ROWS, prefill=True, position=0))
    frame = decode(memoryview(bytearray(encode(header, codec.encode(rows, "float32")))))
    table = SimpleNamespace(get=lambda _session, _epoch: found)
    (event,) = of_activations("other", frame, header, table, spec())  # type: ignore[arg-type]
    assert isinstance(event, RowsArrived)
    for place, arrived in enumerate(event.rows):
        payload, own = arrived[-1], rows[place * ROWS : (place + 1) * ROWS]
        log.record(0, payload.encoded)
        inputs = payload.inputs()
        assert inputs is not None
        assert torch.equal(inputs, own)
        inputs.zero_()
        assert log.read(0, ROWS) == bytes(codec.bytes_of(own))


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


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("others", [1, COST.steps_per_batch - 1, COST.steps_per_batch, 2000])
@pytest.mark.parametrize("prefill", [False, True])
def test_rows_that_wait_keep_little_more_memory_than_their_own(
    encoding: str, others: int, *, prefill: bool
) -> None:
    """A message of many rows may have one that waits long."""
    header = pb.Activations(hidden_size=WIDTH, dtype=encoding)
    header.rows.append(pb.ActivationRow(session=b"one", step=1, rows=1, prefill=False))
    header.rows.append(pb.ActivationRow(session=b"others", step=1, rows=others, prefill=prefill))
    rows = torch.randn(1 + others, WIDTH)
    payload = memoryview(bytearray(codec.encode(rows, encoding)))
    parts = read_activations(payload, header, spec())
    expected = torch.split(codec.decode(payload, 1 + others, WIDTH, "float32", encoding), [1, others])
    for part, own in zip(parts, expected, strict=True):
        assert part is not None
        assert torch.equal(part, own)
        assert part.untyped_storage().nbytes() <= COST.steps_per_batch * part.nbytes
