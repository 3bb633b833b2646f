"""`python tests/support/devices/wired_rank.py ARGUMENTS`: one rank in a process of its own that counts what its
sockets receive.

Prints one JSON object. Each rank has the logits of its part of the vocabulary: they are put together by a sum, which is
not counted.
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path

import torch

from molink.shards.batching.collectives import RankGroup
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint import store
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.tensor_parallel import Shard, vocabulary_part

_BYTES_RECEIVED = struct.Struct("<Q")
_BYTES_RECEIVED_OFFSET = 128
"""Of tcpi_bytes_received in Linux's struct tcp_info, since version 4.1: repeated segments count once."""
_FDS = Path("/proc/self/fd")


def received_bytes() -> int | None:
    """What all TCP sockets of this process have received, framing included; None where the system does not tell."""
    if not _FDS.exists() or not hasattr(socket, "TCP_INFO"):
        return None
    total = 0
    for entry in list(_FDS.iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # no TCP socket, or closed meanwhile
        if len(info) >= _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
            total += _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
    return total


def main(folder: Path, rendezvous: Path, rank: int, ranks: int, prompt: list[int], tokens: int) -> None:
    torch.set_num_threads(1)
    manifest = store.read_manifest(folder)
    spec = store.describe(manifest, "float32")
    group = RankGroup(rank, ranks, "cpu", rendezvous, 60.0)
    group.open()
    engine = Engine(spec, "cpu")
    engine.attach(
        load_stage(
            folder,
            spec.whole,
            StageSettings("float32", shard=Shard(rank, ranks, group.all_reduce)),
            manifest=manifest,
        )
    )
    cache = engine.new_cache(spec.whole, len(prompt) + tokens)
    before = received_bytes()
    drawn: list[int] = []
    wire = 0
    while len(drawn) < tokens:
        new = tuple(drawn[-1:] or prompt)
        with group.stepping():
            part = engine.step(spec.whole, [Rows(cache, len(new), new, logit_rows=1)], None)
        after = received_bytes()
        wire += (after or 0) - (before or 0)
        logits = torch.zeros(1, spec.vocabulary_size)
        start, stop = vocabulary_part(spec.vocabulary_size, rank, ranks)
        logits[:, start:stop] = part
        reduced, reductions = group.reduced_bytes, group.reductions
        with group.stepping():
            logits = group.all_reduce(logits)
        group.reduced_bytes, group.reductions = reduced, reductions
        before = received_bytes()
        drawn.append(int(logits[0].argmax()))
    told = {"tokens": drawn, "reductions": group.reductions, "payload_bytes": group.reduced_bytes}
    print(json.dumps({**told, "wire_bytes": None if before is None else wire}), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given.pop("folder")), Path(given.pop("rendezvous")), **given)
