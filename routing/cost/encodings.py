"""Which encoding activations have on a link: agreed by all three who are concerned, or none. Pure.

Nobody gets less exact tokens unasked. The client asks for a codec in the session's descriptor; each peer says in its
signed facts which ones it takes part in (`molink-peer join --activation-codec`). Since a descriptor carries the facts
of every hop, both ends of a link work out the same encoding from it, and a frame that says another is refused: there is
nothing to negotiate, nothing to mix up. A link where one end has not opted in carries the model's own numbers, which is
never worse than what was asked for.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

from molink.shards.spec import ACTIVATION_CODECS, DTYPE_BYTES

SETTINGS = ("none", "auto", "float16", "bfloat16", "int8")
"""What a peer can be told: none (the default), every codec, or one of them."""

_VALUE_BYTES = {**DTYPE_BYTES, "int8": 1}


def opted_in(setting: str, dtype: str) -> tuple[str, ...]:
    """The codecs that a peer with this setting announces: of those, the ones that save bytes for a model in `dtype`.

    Raises ValueError for a setting that is not in SETTINGS.
    """
    if setting not in SETTINGS:
        raise ValueError(f"activation codecs are {', '.join(SETTINGS)}, got {setting!r}")
    named = ACTIVATION_CODECS if setting == "auto" else (setting,)
    return tuple(codec for codec in named if saves(codec, dtype))


def saves(codec: str, dtype: str) -> bool:
    """Whether the codec takes fewer bytes than numbers of `dtype` do. Other codecs change numbers for nothing."""
    return codec in _VALUE_BYTES and _VALUE_BYTES[codec] < _VALUE_BYTES[dtype]


def encoding_of_link(asked: str, dtype: str, sender: Collection[str], receiver: Collection[str]) -> str:
    """How activations travel from one peer to the next: `asked` if both have opted in and it saves bytes, else `dtype`.

    `asked` is the session's codec (empty: it wants no loss), `sender` and `receiver` are what both announce.
    """
    agreed = asked in sender and asked in receiver and saves(asked, dtype)
    return asked if agreed else dtype


def encodings_of_circuit(asked: str, dtype: str, hops: Sequence[Collection[str]]) -> tuple[str, ...]:
    """That of the link out of each hop, given what each announces. The tail sends tokens: for it, `dtype`."""
    links = (encoding_of_link(asked, dtype, sender, receiver) for sender, receiver in pairwise(hops))
    return (*links, dtype)
