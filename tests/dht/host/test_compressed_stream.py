"""What is deflated comes out as it went in, and nothing that comes in makes a peer grow."""

import contextlib
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.host.compressed_stream import Deflater, Inflater
from molink.dht.host.framing import MAX_FRAME_BYTES
from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts, sign_state
from molink.peer.wire.link.certificate import new_certificate

batches = st.lists(st.lists(st.binary(max_size=300), max_size=5), max_size=8)


@given(batches)
def test_frames_come_out_as_they_went_in(batches: list[list[bytes]]) -> None:
    deflater, inflater = Deflater(), Inflater()
    for batch in batches:
        out = []
        for piece in deflater.pack(batch):
            assert len(piece) <= MAX_FRAME_BYTES
            inflater.feed(piece)
            while (frame := inflater.take(300)) is not None:
                out.append(frame)
        assert out == batch


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=6))
def test_whatever_is_fed_is_taken_or_refused(pieces: list[bytes]) -> None:
    inflater = Inflater()
    with contextlib.suppress(ValueError):
        for piece in pieces:
            inflater.feed(piece)
            while (frame := inflater.take(100)) is not None:
                assert len(frame) <= 100


@pytest.mark.full
def test_a_piece_that_inflates_to_a_thousand_times_its_size_is_not_held() -> None:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflate.compress((b"\x01\x00" + bytes(256)) * 100_000) + deflate.flush(zlib.Z_SYNC_FLUSH)
    inflater = Inflater()
    inflater.feed(bomb)
    for _ in range(1000):
        assert inflater.take(256) == bytes(256)
        assert inflater.held_bytes <= len(bomb) + 258


def test_a_frame_over_the_limit_is_refused_before_it_is_inflated() -> None:
    inflater = Inflater()
    for piece in Deflater().pack([bytes(301)]):
        inflater.feed(piece)
    with pytest.raises(ValueError, match="301 bytes"):
        inflater.take(300)


def test_a_stream_that_says_it_is_over_is_refused() -> None:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    inflater = Inflater()
    inflater.feed(deflate.compress(b"\0\0") + deflate.flush())
    with pytest.raises(ValueError, match="ended"):
        tuple(iter(lambda: inflater.take(10), None))


def test_the_records_of_a_swarm_take_half_their_size() -> None:
    deflater = Deflater()
    whole = packed = 0
    for _ in range(30):
        identity = Identity.generate()
        facts = replace(facts_of(identity), certificate=new_certificate(identity.peer_id).der)
        for frame in (sign_facts(facts, identity), sign_state(state_of(identity), identity)):
            whole += len(frame)
            packed += sum(map(len, deflater.pack([frame])))
    assert packed < 0.6 * whole
