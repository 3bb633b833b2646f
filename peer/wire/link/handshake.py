"""Handshake of a link: the dialler pins the acceptor's certificate, and proves its own identity.

The acceptor is authenticated by TLS: its certificate is the one in its signed facts. The dialler signs the acceptor's
nonce, the hash of the acceptor's certificate and its own peer id, so that a proof is worth nothing elsewhere or later.
In a private swarm both nonce and ids are also authenticated with the swarm key.
"""

import secrets
from dataclasses import dataclass

from molink.dht.identity.identity import Identity, peer_id_of, verify
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PROTOCOL_VERSION
from molink.peer.wire.link.certificate import certificate_hash
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

_DOMAIN = b"molink-link-1\0"
NONCE_BYTES = 32
LINK_ID_BYTES = 16


class HandshakeRefused(ProtocolError):
    """The dialler is not who it says, speaks another protocol version, or lacks the swarm key."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The proven other end of a link."""

    peer_id: str
    is_client: bool
    network: str = ""
    """Where it dialled from, as far as that tells people apart; empty: nobody knows."""


def challenge() -> pb.Challenge:
    """Challenges whoever has dialled: a fresh nonce."""
    return pb.Challenge(protocol_version=PROTOCOL_VERSION, nonce=secrets.token_bytes(NONCE_BYTES))


def prove(
    question: pb.Challenge,
    identity: Identity,
    certificate: bytes,
    swarm_key: SwarmKey | None,
    *,
    link_id: bytes,
    is_client: bool,
) -> pb.Proof:
    """Proves `identity` to the acceptor that presented `certificate` (DER).

    Raises:
        HandshakeRefused: the acceptor speaks another protocol version, or its nonce is not one.
    """
    _require_version(question.protocol_version)
    if len(question.nonce) != NONCE_BYTES:
        raise HandshakeRefused(f"a nonce of {len(question.nonce)} bytes is not one of {NONCE_BYTES}")
    statement = _statement(question.nonce, certificate, identity.peer_id)
    return pb.Proof(
        protocol_version=PROTOCOL_VERSION,
        public_key=identity.public_key,
        signature=identity.sign(statement),
        swarm_key_proof=swarm_key.proof(statement) if swarm_key else b"",
        is_client=is_client,
        link_id=link_id,
    )


def check(proof: pb.Proof, question: pb.Challenge, certificate: bytes, swarm_key: SwarmKey | None) -> Remote:
    """Who answered `question`, asked by the acceptor with `certificate` (DER).

    Raises:
        HandshakeRefused: with the reason, for the dialler to read.
    """
    _require_version(proof.protocol_version)
    if len(proof.public_key) != 32:
        raise HandshakeRefused(f"a public key of {len(proof.public_key)} bytes is not an Ed25519 key")
    if len(proof.link_id) != LINK_ID_BYTES:
        raise HandshakeRefused(f"a link id of {len(proof.link_id)} bytes is not one of {LINK_ID_BYTES}")
    peer_id = peer_id_of(proof.public_key)
    statement = _statement(question.nonce, certificate, peer_id)
    if not verify(proof.public_key, statement, proof.signature):
        raise HandshakeRefused(f"the signature is not that of {peer_id}")
    if swarm_key is not None and not swarm_key.check(statement, proof.swarm_key_proof):
        raise HandshakeRefused("this swarm is private: start with --swarm-key and the swarm's key file")
    return Remote(peer_id, proof.is_client)


def _statement(nonce: bytes, certificate: bytes, peer_id: str) -> bytes:
    return _DOMAIN + nonce + certificate_hash(certificate) + peer_id.encode()


def _require_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise HandshakeRefused(
            f"protocol version {version} is not {PROTOCOL_VERSION}: update the older of the two peers"
        )
