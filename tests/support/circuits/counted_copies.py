"""Copies of a hop's KV cache as a standby keeps them, on an engine that counts tokens and computes nothing."""

from collections.abc import Sequence
from typing import cast

from support.links.data_plane import SPEC, describe, hop_of
from torch import Tensor

from molink.dht.identity.identity import Identity
from molink.peer.engine.kept_copy import KeptCopy, input_rows
from molink.peer.engine.sessions import SessionPlan, read_plan
from molink.peer.redundancy.copy_intake import CopyIntake
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.wire.link.link import Link
from molink.shards.batching.engine import Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

PLAN: SessionPlan = read_plan(
    describe([hop_of(Identity.generate(), Span(0, 3)), hop_of(Identity.generate(), Span(3, 6))]), SPEC
)
LINE_BYTES = sum(SPEC.kv_bytes_per_token[0:3])
ROW_BYTES = SPEC.activation_bytes


class CountingCache:
    """As a KV cache, but for the keys and values."""

    closed, length = False, 0

    def restore(self, start: int, tokens: int, exported: bytes) -> None:
        if start > self.length or len(exported) != tokens * LINE_BYTES:
            raise ValueError("no such tokens")
        self.length = start + tokens


class CountingEngine:
    """As an engine, but for the numbers: it refuses what an engine refuses."""

    spec = SPEC

    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> None:
        (row,) = rows
        assert (span.start == 0) == (hidden is None)
        if hidden is not None:
            assert hidden.shape == (row.count, SPEC.hidden_size)
            assert bool(hidden.isfinite().all())
        elif max(row.token_ids or ()) >= SPEC.vocabulary_size:
            raise ValueError("no token id")
        row.cache.length += row.count

    def to_host(self, _: Sequence[Tensor]) -> None:
        return None


def kept_copy(hop: int) -> KeptCopy:
    log = InputLogs(10**6).open(*input_rows(PLAN, hop, SPEC))
    cache = cast("SequenceCache", CountingCache())
    intake = CopyIntake(PLAN.capacity_tokens)
    return KeptCopy(PLAN, hop, cast("Link", None), intake, log, cache)
