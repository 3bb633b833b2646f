"""Signed announcements: facts, state and loss of a peer as bytes, and back, with every bound checked.

A record is one byte (what it is), 64 bytes of Ed25519 signature, and a protobuf body (announcement.proto).
The signature covers a domain, the first byte and the body as received: nothing is encoded again to check it.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from molink.dht.identity.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.bounds import MAX_SEQUENCE, whole
from molink.dht.records.facts_codec import facts_from_message, facts_to_message
from molink.dht.records.records import PeerFacts, PeerLoss, PeerState
from molink.dht.records.state_codec import peer_tag, state_from_message, state_to_message

MAX_FACTS_BYTES = 4096
MAX_STATE_BYTES = 150
MAX_LOSS_BYTES = 96

_Value = TypeVar("_Value")

_DOMAIN = b"molink-announcement-1\0"
_FACTS = 0xF1
_STATE = 0x51
_LOSS = 0x60
_HEAD_BYTES = 1 + SIGNATURE_BYTES


class Reason(StrEnum):
    """Reason why a record is refused."""

    MALFORMED = "malformed"
    """Not an announcement, or a value is out of bounds."""
    FORGED = "forged"
    """The signature does not fit the content or its author."""
    EXPIRED = "expired"
    """Its time to live is over."""
    STALE = "stale"
    """The same author's newer statement, or this one, is known already."""
    UNKNOWN_PEER = "unknown_peer"
    """A state whose author's facts, and therefore key, are not known; or a loss of or by such, or of unheard words."""
    OVERSIZED = "oversized"
    """Longer than an announcement may be."""
    CROWDED = "crowded"
    """Facts of a newcomer for whom there is no room, or from a neighbour that has told of too many."""


class AnnouncementError(ValueError):
    """A record is refused, or a value cannot be announced."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def sign_facts(facts: PeerFacts, identity: Identity) -> bytes:
    """Signs `facts`: a record of at most 4096 bytes. Of more than 32 links, the nearest are announced.

    Raises:
        AnnouncementError: a value is out of the bounds that receivers check, or the facts are another's.
    """
    if (facts.peer_id, facts.public_key) != (identity.peer_id, identity.public_key):
        raise AnnouncementError(Reason.FORGED, f"{identity.peer_id} cannot sign facts of {facts.peer_id}")
    message = _checked(lambda: facts_to_message(facts))
    record = _sign(_FACTS, message, identity)
    if len(record) > MAX_FACTS_BYTES:
        raise AnnouncementError(
            Reason.OVERSIZED,
            f"the facts take {len(record)} bytes, more than {MAX_FACTS_BYTES}: announce fewer links",
        )
    verify_facts(record)
    return record


def verify_facts(record: bytes) -> PeerFacts:
    """Verifies a record of facts: its signature is that of the peer that it names.

    Raises:
        AnnouncementError: oversized, malformed or forged.
    """
    body = _body(record, _FACTS, MAX_FACTS_BYTES)
    message = pb.Facts()
    _parse(message, body)
    if len(message.public_key) != PUBLIC_KEY_BYTES:
        raise AnnouncementError(Reason.MALFORMED, "facts carry a public key of 32 bytes")
    if not _signed(record, message.public_key):
        raise AnnouncementError(
            Reason.FORGED, f"the facts are not signed by {peer_id_of(message.public_key)}"
        )
    return _checked(lambda: facts_from_message(message))


def sign_state(state: PeerState, identity: Identity) -> bytes:
    """Signs `state`: a record of at most 150 bytes.

    Free memory is rounded down to 8 significant bits, adjacent spans are joined, and of more than 8 spans
    the longest are announced, of those that load the longest one.

    Raises:
        AnnouncementError: a value is out of the bounds that receivers check, or the state is of another peer.
    """
    if state.peer_id != identity.peer_id:
        raise AnnouncementError(Reason.FORGED, f"{identity.peer_id} cannot sign the state of {state.peer_id}")
    record = _sign(_STATE, _checked(lambda: state_to_message(state, identity.public_key)), identity)
    if len(record) > MAX_STATE_BYTES:
        raise AnnouncementError(
            Reason.OVERSIZED, f"the state takes {len(record)} bytes, more than {MAX_STATE_BYTES}"
        )
    return record


def verify_state(record: bytes, known_public_keys: Mapping[int, bytes]) -> PeerState:
    """Verifies a record of state; its author's key is looked up by `peer_tag` in `known_public_keys`.

    Raises:
        AnnouncementError: oversized, malformed, forged, or unknown_peer.
    """
    message = pb.State()
    _parse(message, _body(record, _STATE, MAX_STATE_BYTES))
    public_key = _signer(record, message.peer_tag, known_public_keys)
    return _checked(lambda: state_from_message(message, peer_id_of(public_key)))


def state_tag(record: bytes) -> int:
    """The tag of the peer that a state record claims to be of, unverified: to ask for that peer's facts.

    Raises:
        AnnouncementError: oversized or malformed.
    """
    message = pb.State()
    _parse(message, _body(record, _STATE, MAX_STATE_BYTES))
    return message.peer_tag


def sign_loss(loss: PeerLoss, identity: Identity) -> bytes:
    """Signs `loss`: a record of at most 96 bytes.

    Raises:
        AnnouncementError: a value is out of bounds, or the witness is another.
    """
    if loss.witness_tag != peer_tag(identity.public_key):
        raise AnnouncementError(Reason.FORGED, f"{identity.peer_id} cannot sign what another witnessed")
    sequence = _checked(lambda: whole("sequence", loss.sequence, MAX_SEQUENCE))
    message = pb.Loss(peer_tag=loss.peer_tag, sequence=sequence, witness_tag=loss.witness_tag)
    return _sign(_LOSS, message, identity)


def verify_loss(record: bytes, known_public_keys: Mapping[int, bytes]) -> PeerLoss:
    """Verifies a record of a loss; its witness's key is looked up in `known_public_keys`.

    Raises:
        AnnouncementError: oversized, malformed, forged, or unknown_peer.
    """
    message = pb.Loss()
    _parse(message, _body(record, _LOSS, MAX_LOSS_BYTES))
    _signer(record, message.witness_tag, known_public_keys)
    sequence = _checked(lambda: whole("sequence", message.sequence, MAX_SEQUENCE))
    return PeerLoss(message.witness_tag, message.peer_tag, sequence)


def is_loss(record: bytes) -> bool:
    """Whether a record claims to be a loss."""
    return record[:1] == bytes((_LOSS,))


def is_state(record: bytes) -> bool:
    """Whether a record claims to be a state."""
    return record[:1] == bytes((_STATE,))


def is_facts(record: bytes) -> bool:
    """Whether a record claims to be facts."""
    return record[:1] == bytes((_FACTS,))


def _sign(kind: int, message: Message, identity: Identity) -> bytes:
    body = message.SerializeToString(deterministic=True)
    head = bytes((kind,))
    return head + identity.sign(_DOMAIN + head + body) + body


def _signer(record: bytes, tag: int, known_public_keys: Mapping[int, bytes]) -> bytes:
    """The key of the peer with that tag, who did sign the record."""
    public_key = known_public_keys.get(tag)
    if public_key is None:
        raise AnnouncementError(Reason.UNKNOWN_PEER, f"no facts are known of the peer with tag {tag:016x}")
    if not _signed(record, public_key):
        raise AnnouncementError(Reason.FORGED, f"the record is not signed by {peer_id_of(public_key)}")
    return public_key


def _signed(record: bytes, public_key: bytes) -> bool:
    signature, body = record[1:_HEAD_BYTES], record[_HEAD_BYTES:]
    return verify(public_key, _DOMAIN + record[:1] + body, signature)


def _body(record: bytes, kind: int, limit: int) -> bytes:
    if len(record) > limit:
        raise AnnouncementError(
            Reason.OVERSIZED, f"a record of {len(record)} bytes, at most {limit} are allowed"
        )
    if len(record) <= _HEAD_BYTES or record[0] != kind:
        raise AnnouncementError(
            Reason.MALFORMED, "the record does not begin as this kind of announcement does"
        )
    return record[_HEAD_BYTES:]


def _parse(message: Message, body: bytes) -> None:
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise AnnouncementError(Reason.MALFORMED, "the record's body cannot be decoded") from error


def _checked(convert: Callable[[], _Value]) -> _Value:
    try:
        return convert()
    except ValueError as error:
        raise AnnouncementError(Reason.MALFORMED, str(error)) from error
