"""The secret that members of a private swarm share: without it, neither plane answers."""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from molink.dht.identity.key_file import KeyFileError, read_key_file, write_key_file

_PREFIX = "molink-swarm-key-v1:"
_LINE = re.compile(re.escape(_PREFIX) + r"([0-9a-f]{64})\s*")
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class SwarmKey:
    """32 random bytes; each use derives its own key from them, so that no use weakens another."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"a swarm key has {SECRET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def generate(cls) -> "SwarmKey":
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def write_new(cls, path: Path) -> "SwarmKey":
        """Makes a key and its file, one line of text, mode 600 on POSIX.

        Raises:
            FileExistsError: there is a file of that name already; it is left as it is.
        """
        key = cls.generate()
        key.write(path)
        return key

    @classmethod
    def load(cls, path: Path) -> "SwarmKey":
        """The key in the file `path`.

        Raises:
            FileNotFoundError: there is none.
            KeyFileError: it is readable by others, or not a swarm key.
        """
        try:
            line = _LINE.fullmatch(read_key_file(path, _PREFIX.encode()).decode("ascii"))
        except UnicodeDecodeError:
            line = None
        if line is None:
            raise KeyFileError(
                f"{path} is not a swarm key: it should be one line, {_PREFIX} and 64 hexadecimal digits. "
                f"Copy it again from a member of the swarm, or make a new one with `molink-peer swarm-key`"
            )
        return cls(bytes.fromhex(line.group(1)))

    @property
    def line(self) -> str:
        """What its file holds, without the end of the line."""
        return f"{_PREFIX}{self.secret.hex()}"

    @classmethod
    def of_line(cls, line: str) -> "SwarmKey":
        """Returns the key that a line of a file holds. Raises `ValueError` if that is none."""
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError("that is no swarm key")
        return cls(bytes.fromhex(found.group(1)))

    def write(self, path: Path) -> None:
        """Makes its file. Raises `FileExistsError` and `OSError` as `write_new`."""
        write_key_file(path, f"{self.line}\n".encode())

    @property
    def libp2p_psk(self) -> str:
        """64 hexadecimal digits: the pre-shared key of the control plane's connections."""
        return self._derive(b"molink-swarm-psk-1").hex()

    def proof(self, context: bytes) -> bytes:
        """32 bytes that show knowledge of the key; `context` must be fresh, or the proof can be replayed."""
        return hmac.digest(self._derive(b"molink-swarm-proof-1"), context, hashlib.sha256)

    def check(self, context: bytes, proof: bytes) -> bool:
        """Whether `proof` was made with this key for `context`, in constant time."""
        return hmac.compare_digest(self.proof(context), proof)

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self.secret, purpose, hashlib.sha256)
