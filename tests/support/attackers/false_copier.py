"""`python tests/support/attackers/false_copier.py ARGUMENTS`: `molink-peer ARGUMENTS` that serves as it should, and
sends its standbys false keys and values, inputs and token ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import load_lean_transformers

if __name__ == "__main__":  # as `molink-peer` does
    load_lean_libp2p()
    load_lean_transformers()

from molink.peer.commands import cli
from molink.peer.serving import copy_sender
from molink.routing.routes.copy_forms import CopyForm

read, logged = copy_sender._read_ranges, copy_sender._logged  # noqa: SLF001 - what it lies with


def negated(content: bytes | bytearray | None) -> bytes | None:
    """Of float32."""
    return None if content is None else (-np.frombuffer(content, np.float32)).tobytes()


def false_lines(ranges: Sequence[Any]) -> list[bytes | bytearray | None]:
    return [negated(one) for one in read(ranges)]


def false_inputs(one: Any) -> bytes | None:  # noqa: ANN401 - a range of a copy
    content = logged(one)
    if one.form is CopyForm.TOKEN_IDS and content is not None:
        return bytes(len(content))
    return negated(content)


if __name__ == "__main__":
    copy_sender._read_ranges = false_lines  # type: ignore[assignment] # noqa: SLF001
    copy_sender._logged = false_inputs  # noqa: SLF001
    cli.main()
