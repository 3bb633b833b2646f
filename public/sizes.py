"""Sizes as people write them on command lines and in configuration files."""

import re
from fractions import Fraction

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgtp]?)(i?)b?|bytes?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """A size that a person wrote: `10GB`, `512MiB`, `12 MB`, `1.5GiB`, or a plain number of bytes.

    KB, MB, GB, TB, PB (or K, M, ...) are powers of 1000 and KiB, MiB, ... (or Ki, Mi, ...) of 1024; case is
    ignored. A part of a byte is dropped.

    Raises:
        ValueError: it is no such size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    prefix, binary = (match[2] or "", match[3] or "") if match else ("", "")
    if match is None or (binary and not prefix):
        raise ValueError(f"{text!r} is not a size: write a number and a unit, such as 10GB, 512MiB or 1.5GiB")
    size = int(Fraction(match[1]) * (1024 if binary else 1000) ** _UNITS[prefix.lower()])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte: write a size such as 10GB or 512MiB")
    return size
