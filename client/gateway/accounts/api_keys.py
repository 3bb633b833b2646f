"""API keys as values: how one is written, what is kept of it, and what it may do."""

import base64
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from molink.client.gateway.accounts.errors import KeyFault

SECRET_BYTES: Final = 32
ID_LENGTH: Final = 12
_ID_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
_TEXT: Final = re.compile(rf"sk-molink-(?P<id>[a-z2-7]{{{ID_LENGTH}}})-(?P<secret>[A-Za-z0-9_-]{{43}})")
_NO_DIGEST: Final = bytes(32)
"""What a secret is compared with whose key is not known, so that it takes the same time."""


class KeyScope(StrEnum):
    """Scope of a key: a group of paths that it opens."""

    USE = "use"
    """Generations, models, the swarm, and the key's own usage."""
    OPERATE = "operate"
    """What is the operator's: `/metrics` and `/admin/v1`."""
    ACCESS = "access"
    """Registering one machine as a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of a key; None, or no models: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and of what is generated together."""
    tokens_per_day: int | None = None
    """In a day of UTC."""
    streams: int | None = None
    """Generations at once."""
    models: tuple[str, ...] = ()
    """Names or hashes of those that may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """API key as it is kept: whoever reads this cannot make the key of it. Times are seconds since 1970 (UTC)."""

    id: str
    """Its public prefix, by which it is found and named."""
    name: str
    digest: bytes
    """SHA-256 of its secret."""
    scopes: frozenset[KeyScope]
    limits: KeyLimits
    quota_id: str
    """Id of the first key of a row of rotations: they have one quota and one share together."""
    created_at_s: float
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    last_used_at_s: float | None = None
    revision: int = 0
    """Number of the last change to any key that changed this one."""

    def fault(self, now_s: float) -> KeyFault | None:
        """Returns why it is not taken now; None if it is."""
        if self.revoked_at_s is not None:
            return KeyFault.REVOKED
        if self.expires_at_s is not None and now_s >= self.expires_at_s:
            return KeyFault.EXPIRED
        return None


def new_key_id() -> str:
    """Returns a random id of 60 bits."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))


def new_secret() -> bytes:
    """Returns the random part of a new key."""
    return secrets.token_bytes(SECRET_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Returns what is kept of a secret. It is random, so that a slow hash would add nothing."""
    return hashlib.sha256(secret).digest()


def key_text(key_id: str, secret: bytes) -> str:
    """Returns the key as its user writes it."""
    return f"sk-molink-{key_id}-{base64.urlsafe_b64encode(secret).rstrip(b'=').decode()}"


def parse_key(text: str) -> tuple[str, bytes] | None:
    """Returns a key's id and secret; None if the text is no key. Each key has one text only."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    secret = base64.urlsafe_b64decode(f"{found['secret']}=")
    return (found["id"], secret) if key_text(found["id"], secret) == text else None


def is_secret_of(secret: bytes, key: ApiKey | None) -> bool:
    """Whether the secret is this key's, in a time that depends on neither."""
    same = hmac.compare_digest(digest_of(secret), _NO_DIGEST if key is None else key.digest)
    return same and key is not None
