"""Identity of a peer: an Ed25519 key, and the libp2p peer id that follows from it."""

from hashlib import blake2b
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from molink.dht.identity.key_file import KeyFileError, read_key_file, write_key_file

PUBLIC_KEY_BYTES = 32
_PEM = b"-----BEGIN "
SIGNATURE_BYTES = 64

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
"""Identity multihash of 36 bytes, holding libp2p's protobuf: key type 1 (Ed25519), 32 bytes of key."""

_FIELD = 2**255 - 19
_Y_OF_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_SMALL_ORDER = frozenset((0, 1, _FIELD - 1, _Y_OF_ORDER_8, _FIELD - _Y_OF_ORDER_8))
"""The y of Ed25519's eight points whose multiples are few: under such a key one signature fits every text."""


class Identity:
    """The private key of a peer or client."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        """32 bytes, Ed25519."""
        self.peer_id = peer_id_of(self.public_key)
        """base58, begins with 12D3Koo."""

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> "Identity":
        """A new identity, known to nobody."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The identity in the key file `path`, which is made if there is none.

        Raises:
            KeyFileError: the file is readable by others or damaged; the text says what to do.
            OSError: it cannot be read or made.
        """
        try:
            return cls._from_pem(read_key_file(path, _PEM), path)
        except FileNotFoundError:
            key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            write_key_file(path, pem)
        except FileExistsError:  # another process was first: its key counts
            return cls._from_pem(read_key_file(path, _PEM), path)
        return cls(key)

    def sign(self, data: bytes) -> bytes:
        """64 bytes, Ed25519."""
        return self._key.sign(data)

    def derived_key(self, purpose: bytes) -> bytes:
        """32 bytes that only the holder of the key can know, and that are the same each time."""
        return blake2b(purpose, key=self.private_bytes(), digest_size=32).digest()

    def private_bytes(self) -> bytes:
        """The 32-byte seed, for libp2p."""
        return self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    @classmethod
    def _from_pem(cls, content: bytes, path: Path) -> "Identity":
        try:
            key = load_pem_private_key(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise _damaged(path) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _damaged(path)
        return cls(key)


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` (64 bytes) over `data` is that of the holder of `public_key` (32 bytes)."""
    if not is_sound(public_key) or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_sound(public_key: bytes) -> bool:
    """Whether an Ed25519 key can be somebody's: 32 bytes, written in the one way there is, and not of small order. Only
    the holder of a sound key can sign with it. Whether it is a point of the curve shows when a signature is checked.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        return False
    y = int.from_bytes(public_key, "little") & (1 << 255) - 1
    return y < _FIELD and y not in _SMALL_ORDER


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id (base58) of a 32-byte Ed25519 key (libp2p specifications, peer ids).

    Raises:
        ValueError: the key has another length.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    data = _PEER_ID_PREFIX + public_key
    number = int.from_bytes(data)
    digits: list[str] = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_BASE58[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def public_key_of(peer_id: str) -> bytes:
    """The 32-byte key inside an Ed25519 peer id.

    Raises:
        ValueError: it is not the peer id of an Ed25519 key, or of a key that is not sound.
    """
    if len(peer_id) != 52:
        raise ValueError("the peer id of an Ed25519 key has 52 characters")
    number = 0
    for character in peer_id:
        digit = _BASE58.find(character)
        if digit < 0:
            raise ValueError("a peer id is written in base58")
        number = number * 58 + digit
    size = len(_PEER_ID_PREFIX) + PUBLIC_KEY_BYTES
    if number >= 1 << (8 * size):
        raise ValueError("the peer id is not that of an Ed25519 key")
    data = number.to_bytes(size)
    public_key = data[len(_PEER_ID_PREFIX) :]
    if peer_id_of(public_key) != peer_id or not is_sound(public_key):
        raise ValueError("the peer id is not that of an Ed25519 key")
    return public_key


def _damaged(path: Path) -> KeyFileError:
    return KeyFileError(
        f"the key file {path} is damaged or holds no Ed25519 key: restore it from a copy, or delete it to "
        f"start as a new peer"
    )
