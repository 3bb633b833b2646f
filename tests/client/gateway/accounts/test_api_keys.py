"""What a key looks like, and when it is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.gateway.accounts.api_keys import (
    ApiKey,
    KeyLimits,
    KeyScope,
    digest_of,
    is_secret_of,
    key_text,
    new_key_id,
    new_secret,
    parse_key,
)
from molink.client.gateway.accounts.errors import KeyFault

secrets = st.binary(min_size=32, max_size=32)


def key(secret: bytes, **changes: float | None) -> ApiKey:
    return ApiKey(
        id="a" * 12,
        name="alice",
        digest=digest_of(secret),
        scopes=frozenset({KeyScope.USE}),
        limits=KeyLimits(),
        quota_id="a" * 12,
        created_at_s=1000.0,
        **changes,
    )


@given(secrets)
def test_a_key_is_read_as_it_was_written(secret: bytes) -> None:
    key_id = new_key_id()
    assert parse_key(key_text(key_id, secret)) == (key_id, secret)


@given(secrets, st.integers(0, 68), st.characters())
def test_a_key_with_one_other_character_is_no_key_or_another_one(secret: bytes, at: int, other: str) -> None:
    text = key_text("abcdefghijkl", secret)
    changed = text[:at] + other + text[at + 1 :]
    parsed = parse_key(changed)
    assert changed == text or parsed is None or parsed != ("abcdefghijkl", secret)


@given(st.text())
def test_other_texts_are_no_keys(text: str) -> None:
    assert parse_key(text) is None


@given(secrets, secrets)
def test_only_its_own_secret_opens_a_key(secret: bytes, other: bytes) -> None:
    assert is_secret_of(secret, key(secret))
    assert is_secret_of(other, key(secret)) == (other == secret)
    assert not is_secret_of(secret, None)


def test_secrets_are_32_random_bytes_and_only_their_hash_is_kept() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert {len(secret) for secret in made} == {32}
    secret = made.pop()
    assert secret not in repr(key(secret)).encode()
    assert key_text("a" * 12, secret)[-43:] not in repr(key(secret))


@pytest.mark.parametrize(
    ("changes", "now_s", "fault"),
    [
        ({}, 2000.0, None),
        ({"expires_at_s": 2000.0}, 1999.9, None),
        ({"expires_at_s": 2000.0}, 2000.0, KeyFault.EXPIRED),
        ({"revoked_at_s": 1500.0}, 1400.0, KeyFault.REVOKED),
        ({"revoked_at_s": 1500.0, "expires_at_s": 1200.0}, 2000.0, KeyFault.REVOKED),
    ],
)
def test_a_key_is_taken_until_it_ends(
    changes: dict[str, float], now_s: float, fault: KeyFault | None
) -> None:
    assert key(b"x" * 32, **changes).fault(now_s) is fault
