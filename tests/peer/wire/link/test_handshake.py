"""Who gets in: the dialler that proves its identity to this acceptor, now, and in a private swarm its membership."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PROTOCOL_VERSION
from molink.peer.wire.link.certificate import new_certificate
from molink.peer.wire.link.handshake import (
    LINK_ID_BYTES,
    NONCE_BYTES,
    HandshakeRefused,
    Remote,
    challenge,
    check,
    prove,
)
from molink.peer.wire.protocol import molink_pb2 as pb

DIALLER = Identity.generate()
STRANGER = Identity.generate()
CERTIFICATE = new_certificate(Identity.generate().peer_id).der
OTHER_CERTIFICATE = new_certificate(Identity.generate().peer_id).der
KEY = SwarmKey.generate()


def proof_of(
    identity: Identity,
    question: pb.Challenge,
    certificate: bytes = CERTIFICATE,
    key: SwarmKey | None = None,
    *,
    is_client: bool = False,
) -> pb.Proof:
    return prove(question, identity, certificate, key, link_id=bytes(LINK_ID_BYTES), is_client=is_client)


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "private"])
def test_the_right_proof_says_who_it_is(key: SwarmKey | None, is_client: bool) -> None:
    question = challenge()
    proof = proof_of(DIALLER, question, key=key, is_client=is_client)
    assert check(proof, question, CERTIFICATE, key) == Remote(DIALLER.peer_id, is_client)


def test_every_challenge_is_new() -> None:
    nonces = {challenge().nonce for _ in range(20)}
    assert len(nonces) == 20
    assert all(len(nonce) == NONCE_BYTES for nonce in nonces)


def test_a_proof_is_worth_nothing_for_another_challenge() -> None:
    proof = proof_of(DIALLER, challenge())
    with pytest.raises(HandshakeRefused, match=f"not that of {DIALLER.peer_id}"):
        check(proof, challenge(), CERTIFICATE, None)


def test_a_proof_is_worth_nothing_to_another_acceptor() -> None:
    question = challenge()
    proof = proof_of(DIALLER, question, OTHER_CERTIFICATE)
    with pytest.raises(HandshakeRefused, match="signature"):
        check(proof, question, CERTIFICATE, None)


def test_nobody_can_show_the_proof_of_another() -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.public_key = STRANGER.public_key
    with pytest.raises(HandshakeRefused, match=f"not that of {STRANGER.peer_id}"):
        check(proof, question, CERTIFICATE, None)


@given(st.binary(max_size=80))
def test_another_signature_is_refused(signature: bytes) -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.signature = signature
    with pytest.raises(HandshakeRefused, match="signature"):
        check(proof, question, CERTIFICATE, None)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_length_is_refused(size: int) -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.public_key = bytes(size)
    with pytest.raises(HandshakeRefused, match=f"key of {size} bytes"):
        check(proof, question, CERTIFICATE, None)


def test_a_key_that_is_no_point_of_the_curve_is_refused() -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.public_key = b"\xff" * 32
    with pytest.raises(HandshakeRefused, match="signature"):
        check(proof, question, CERTIFICATE, None)


def test_the_key_under_which_one_signature_fits_every_text_is_refused() -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.public_key = (1).to_bytes(32, "little")
    proof.signature = proof.public_key + bytes(32)
    with pytest.raises(HandshakeRefused, match="signature"):
        check(proof, question, CERTIFICATE, None)


@pytest.mark.parametrize("key", [None, SwarmKey.generate()], ids=["none", "another"])
def test_a_private_swarm_lets_in_nobody_without_its_key(key: SwarmKey | None) -> None:
    question = challenge()
    with pytest.raises(HandshakeRefused, match="private: start with --swarm-key"):
        check(proof_of(DIALLER, question, key=key), question, CERTIFICATE, KEY)


def test_a_members_key_proof_cannot_be_borrowed() -> None:
    question = challenge()
    borrowed = proof_of(DIALLER, question, key=KEY).swarm_key_proof
    proof = proof_of(STRANGER, question)
    proof.swarm_key_proof = borrowed
    with pytest.raises(HandshakeRefused, match="private"):
        check(proof, question, CERTIFICATE, KEY)


def test_a_swarm_key_too_many_does_no_harm() -> None:
    question = challenge()
    assert check(proof_of(DIALLER, question, key=KEY), question, CERTIFICATE, None).peer_id == DIALLER.peer_id


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_another_protocol_version_is_refused_at_both_ends(version: int) -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.protocol_version = version
    with pytest.raises(HandshakeRefused, match=f"version {version} .* update the older"):
        check(proof, question, CERTIFICATE, None)
    question.protocol_version = version
    with pytest.raises(HandshakeRefused, match=f"version {version} .* update the older"):
        proof_of(DIALLER, question)


@pytest.mark.parametrize("size", [0, NONCE_BYTES - 1, NONCE_BYTES + 1])
def test_a_dialler_signs_nothing_but_a_nonce(size: int) -> None:
    question = pb.Challenge(protocol_version=PROTOCOL_VERSION, nonce=bytes(size))
    with pytest.raises(HandshakeRefused, match=f"nonce of {size} bytes"):
        proof_of(DIALLER, question)


@pytest.mark.parametrize("size", [0, LINK_ID_BYTES - 1, LINK_ID_BYTES + 1])
def test_a_link_id_of_another_length_is_refused(size: int) -> None:
    question = challenge()
    proof = proof_of(DIALLER, question)
    proof.link_id = bytes(size)
    with pytest.raises(HandshakeRefused, match=f"link id of {size} bytes"):
        check(proof, question, CERTIFICATE, None)
