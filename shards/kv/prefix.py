"""Names of shared blocks: two sessions whose tokens agree up to a block's end have the same name for it. Pure."""

from collections.abc import Sequence
from hashlib import blake2b

from molink.shards.spec import KV_BLOCK_TOKENS, Span

NAME_BYTES = 16
MAX_PREFIX_BLOCKS = 1024
"""So many blocks of a session are named at most."""


def names_at(
    names: Sequence[bytes], owner: str, before: Sequence[tuple[str, Span, str]]
) -> tuple[bytes, ...]:
    """The same places, under names that nobody else has: sessions of different owners share nothing, so that nobody
    learns from a hit what another has asked. Nor do sessions over different hops `before` this one (peer ids, spans,
    and how their rows are encoded), whose rows the blocks are computed from: what a lying hop has sent is found by
    sessions over that hop alone, and rows that lost something on their way by sessions that have agreed to that.
    """
    places = "".join(f" {peer_id} {span.start} {span.stop} {encoding}" for peer_id, span, encoding in before)
    key = blake2b(f"{owner}{places}".encode(), digest_size=32).digest()
    return tuple(blake2b(name, key=key, digest_size=NAME_BYTES).digest() for name in names)


def common_position(held: Sequence[tuple[int, int]]) -> int:
    """The latest position of a sequence from which on all hops can step it: each from its first number to its second,
    or from the beginning."""
    most = min(most for _, most in held)
    return most if all(least <= most for least, _ in held) else 0


def split_names(joined: bytes, most: int) -> tuple[bytes, ...]:
    """Names that travel one behind the other. Raises ValueError where these are no whole names, or more than `most`."""
    if len(joined) % NAME_BYTES or len(joined) > NAME_BYTES * most:
        raise ValueError(f"names of blocks have {NAME_BYTES} bytes each and are at most {most}")
    return tuple(joined[first : first + NAME_BYTES] for first in range(0, len(joined), NAME_BYTES))


def block_names(token_ids: Sequence[int], key: bytes) -> tuple[bytes, ...]:
    """A name of NAME_BYTES bytes for each full block: a keyed hash of all tokens up to its end, so that a name stands
    for a place in a text and not for a block alone.

    `key` (any length) is what sessions must have in common to share: at least the model. Who has the key can find out
    whether a text that they guess is the one that was hashed. Token ids are in [0, 2**32).
    """
    root = blake2b(key, digest_size=NAME_BYTES).digest()
    names: list[bytes] = []
    for end in range(KV_BLOCK_TOKENS, len(token_ids) + 1, KV_BLOCK_TOKENS):
        block = token_ids[end - KV_BLOCK_TOKENS : end]
        content = b"".join(token.to_bytes(4, "little") for token in block)
        root = blake2b(content, key=root, digest_size=NAME_BYTES).digest()
        names.append(root)
    return tuple(names)
