"""Proof of identity between a relay and who uses it, both ways, before anything else is said.

Each signs both nonces and both identities, so that a proof is worth nothing elsewhere or later; the relay signs with it
where it sees the other end come from. In a private swarm both also prove that they have the swarm key. Nothing of this
is secret: what is joined later is TLS between the two ends, and the relay is trusted with nothing but delay.
"""

import secrets

from molink.dht.identity.identity import (
    PUBLIC_KEY_BYTES,
    Identity,
    is_sound,
    peer_id_of,
    public_key_of,
    verify,
)
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.wire.reach.packets import NONCE_BYTES, Challenge, RelayError, RelayProof, RelayWelcome

_USER = b"molink-relay-user-1\0"
_RELAY = b"molink-relay-1\0"


def new_challenge() -> Challenge:
    """A fresh nonce for whoever comes."""
    return Challenge(secrets.token_bytes(NONCE_BYTES))


def prove_user(
    challenge: Challenge, relay_peer_id: str, identity: Identity, swarm_key: SwarmKey | None
) -> RelayProof:
    """Proves `identity` to the relay of that peer id."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    statement = _statement(_USER, challenge.nonce, nonce, relay_peer_id, identity.peer_id)
    proof = swarm_key.proof(statement) if swarm_key else b""
    return RelayProof(identity.public_key, nonce, identity.sign(statement), proof)


def check_user(
    proof: RelayProof, challenge: Challenge, relay_peer_id: str, swarm_key: SwarmKey | None
) -> str:
    """The peer id of who has answered the relay's challenge.

    Raises:
        RelayError: with the reason, for the other end to read.
    """
    if len(proof.public_key) != PUBLIC_KEY_BYTES or not is_sound(proof.public_key):
        raise RelayError("the public key is nobody's")
    peer_id = peer_id_of(proof.public_key)
    statement = _statement(_USER, challenge.nonce, proof.nonce, relay_peer_id, peer_id)
    if not verify(proof.public_key, statement, proof.signature):
        raise RelayError("the signature is not that of the key")
    if swarm_key is not None and not swarm_key.check(statement, proof.swarm_proof):
        raise RelayError("this swarm is private")
    return peer_id


def prove_relay(
    challenge: Challenge, proof: RelayProof, observed: str, identity: Identity, swarm_key: SwarmKey | None
) -> RelayWelcome:
    """The relay's own proof, and where it sees the other end."""
    statement = _relay_statement(
        challenge, proof.nonce, identity.peer_id, peer_id_of(proof.public_key), observed
    )
    swarm_proof = swarm_key.proof(statement) if swarm_key else b""
    return RelayWelcome(identity.sign(statement), observed, swarm_proof)


def check_relay(
    welcome: RelayWelcome,
    challenge: Challenge,
    proof: RelayProof,
    relay_peer_id: str,
    peer_id: str,
    swarm_key: SwarmKey | None,
) -> None:
    """Checks that the welcome is that relay's, made for this proof.

    Raises:
        RelayError: it is not.
    """
    statement = _relay_statement(challenge, proof.nonce, relay_peer_id, peer_id, welcome.observed)
    if not verify(public_key_of(relay_peer_id), statement, welcome.signature):
        raise RelayError(f"who answers is not {relay_peer_id}")
    if swarm_key is not None and not swarm_key.check(statement, welcome.swarm_proof):
        raise RelayError(f"{relay_peer_id} has another swarm key")


def _relay_statement(
    challenge: Challenge, nonce: bytes, relay_peer_id: str, peer_id: str, observed: str
) -> bytes:
    return _statement(_RELAY, challenge.nonce, nonce, relay_peer_id, peer_id) + observed.encode()


def _statement(domain: bytes, relay_nonce: bytes, nonce: bytes, relay_peer_id: str, peer_id: str) -> bytes:
    """All parts but the last have one length, or an end of their own."""
    return domain + relay_nonce + nonce + relay_peer_id.encode() + b"\0" + peer_id.encode() + b"\0"
