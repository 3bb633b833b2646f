"""Packets of a relay: what is encoded is decoded, anything else is refused, and proofs are worth nothing elsewhere."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.relay_examples import EXAMPLES

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.wire.reach.packets import Packet, RelayError, RelayRefusal, decode_relay, encode_relay
from molink.peer.wire.reach.relay_proof import (
    check_relay,
    check_user,
    new_challenge,
    prove_relay,
    prove_user,
)


def test_the_test_vectors_of_the_document_are_these_examples() -> None:
    text = (Path(__file__).parents[4] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
    found = re.findall(r"^RELAY (.*)\n((?:[0-9a-f]+\n)+)", text, re.MULTILINE)
    assert [(said, bytes.fromhex(digits.replace("\n", ""))) for said, digits in found] == [
        (said, encode_relay(packet)) for packet, said in EXAMPLES
    ]


@pytest.mark.parametrize("packet", [packet for packet, _ in EXAMPLES])
def test_what_is_encoded_is_decoded(packet: Packet) -> None:
    assert decode_relay(encode_relay(packet)) == packet


@pytest.mark.parametrize("packet", [packet for packet, _ in EXAMPLES])
@given(cut=st.integers(1, 200), more=st.binary(min_size=1, max_size=3))
def test_what_is_cut_or_lengthened_is_refused(packet: Packet, cut: int, more: bytes) -> None:
    data = encode_relay(packet)
    for changed in (data[:-cut], data + more):
        with pytest.raises(RelayError):
            decode_relay(changed)


@given(st.binary(max_size=600))
def test_any_bytes_are_a_packet_or_refused(data: bytes) -> None:
    try:
        packet = decode_relay(data)
    except RelayError:
        return
    assert encode_relay(packet) == data


def test_a_text_that_is_too_long_is_cut_and_one_that_is_not_printable_is_refused() -> None:
    cut = decode_relay(encode_relay(RelayRefusal("é" * 200)))
    assert cut == RelayRefusal("é" * 127)
    with pytest.raises(RelayError, match="printable"):
        decode_relay(encode_relay(RelayRefusal("\x1b[2J")))


def test_a_proof_is_worth_nothing_at_another_relay_or_for_another_nonce_or_without_the_swarm_key() -> None:
    relay, other, user, key = (
        Identity.generate(),
        Identity.generate(),
        Identity.generate(),
        SwarmKey.generate(),
    )
    challenge = new_challenge()
    proof = prove_user(challenge, relay.peer_id, user, key)
    assert check_user(proof, challenge, relay.peer_id, key) == user.peer_id
    for peer_id, asked, swarm_key in (
        (other.peer_id, challenge, key),
        (relay.peer_id, new_challenge(), key),
        (relay.peer_id, challenge, SwarmKey.generate()),
    ):
        with pytest.raises(RelayError):
            check_user(proof, asked, peer_id, swarm_key)
    with pytest.raises(RelayError, match="nobody"):
        check_user(replace(proof, public_key=bytes(32)), challenge, relay.peer_id, key)


def test_a_welcome_is_the_relays_for_this_proof_and_this_address() -> None:
    relay, other, user, key = (
        Identity.generate(),
        Identity.generate(),
        Identity.generate(),
        SwarmKey.generate(),
    )
    challenge = new_challenge()
    proof = prove_user(challenge, relay.peer_id, user, key)
    welcome = prove_relay(challenge, proof, "203.0.113.10:4000", relay, key)
    check_relay(welcome, challenge, proof, relay.peer_id, user.peer_id, key)
    for false in (
        replace(welcome, observed="203.0.113.10:4001"),
        prove_relay(challenge, proof, "203.0.113.10:4000", other, key),
        prove_relay(new_challenge(), proof, "203.0.113.10:4000", relay, key),
        prove_relay(challenge, proof, "203.0.113.10:4000", relay, SwarmKey.generate()),
    ):
        with pytest.raises(RelayError):
            check_relay(false, challenge, proof, relay.peer_id, user.peer_id, key)
