"""The TLS certificate of a peer's data plane: self-signed, and pinned by diallers from signed facts."""

import hashlib
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from molink.dht.identity.swarm_key import SwarmKey

_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(2100, 1, 1, tzinfo=UTC)
"""Fixed and far apart: clocks at home are wrong, and the pin, not the calendar, is what is trusted."""
_NAME_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Certificate:
    """An ECDSA P-256 certificate with its key (Ed25519 certificates do not work in gRPC)."""

    peer_id: str
    pem: bytes
    der: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a peer proves itself with to those who dial it."""

    peer_id: str
    certificate: Certificate
    swarm_key: SwarmKey | None = None
    """Of a private swarm; None: anyone may connect."""


def new_certificate(peer_id: str) -> Certificate:
    """A fresh certificate for the peer: made at each start, valid as soon as the peer has announced it.

    The subject is the end of the peer id: gRPC confuses trusted certificates whose subjects are equal, and every
    byte of it goes to the whole swarm.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer_id[-_NAME_CHARACTERS:])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(peer_id))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Certificate(
        peer_id=peer_id,
        pem=certificate.public_bytes(Encoding.PEM),
        der=certificate.public_bytes(Encoding.DER),
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


def server_name(peer_id: str) -> str:
    """The name that a dialler expects in the peer's certificate, whatever address it dials."""
    return f"{peer_id[-_NAME_CHARACTERS:].lower()}.molink"


def certificate_hash(der: bytes) -> bytes:
    """32 bytes that name a certificate: SHA-256 of its DER."""
    return hashlib.sha256(der).digest()
