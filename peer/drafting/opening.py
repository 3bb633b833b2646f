"""Opens a draft model on the peer's device, of any architecture that is served: what it takes, its weights, and what
its guesses take as measured now."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from molink.peer.drafting.draft_engine import LEAST_PART_TOKENS, MOST_PART_TOKENS, DraftEngine, DraftOrder
from molink.peer.models.model import LocalModel
from molink.peer.speculation.told_draft import DraftTimes
from molink.shards.batching.engine import Engine
from molink.shards.batching.ways import DecodingWay, decoding_in
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.spec import ModelSpec, SamplingParams

WINDOW_TOKENS = 2048
"""Of a sequence a draft sees at most so many, its end."""
LEAST_WINDOW_TOKENS = 64
PART_PLACES = 3
"""A part of a sequence that nobody waits for takes about as long as so many places."""
TRIED_TRIPS, TRIED_GUESSES, TRIED_SEQUENCES = 4, 4, 8
"""By which it is measured what a place takes, alone and beside others."""


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft model before anything of it is loaded."""

    model: LocalModel
    window_tokens: int
    sequences: int
    """That it guesses for at a time."""

    @property
    def needed_bytes(self) -> int:
        """Of its weights, and of the KV caches of all sequences."""
        return self.model.spec.weight_bytes(self.model.spec.whole) + self.cache_bytes

    @property
    def cache_bytes(self) -> int:
        """Of all sequences' KV caches."""
        return self.sequences * self.model.spec.kv_bytes(self.model.spec.whole, self.window_tokens)


def plan_draft(folder: Path, name: str, dtype: str, digests: Path | None, sequences: int) -> PlannedDraft:
    """What the model in that folder is as a draft, in the numbers that the peer serves in.

    Raises:
        StoreError, ValueError: it cannot be read, or cannot go back to what was accepted; a sentence says why.
    """
    manifest = read_manifest(folder, digests)
    spec = describe(manifest, dtype, "none", name=name)
    if any(spec.state_bytes):
        raise ValueError("its layers keep states, which do not go back to what was accepted of its guesses")
    window_tokens = _window_of(spec)
    if window_tokens < LEAST_WINDOW_TOKENS:
        raise ValueError(
            f"it sees {window_tokens} tokens, and a draft model has to see {LEAST_WINDOW_TOKENS} at least"
        )
    return PlannedDraft(LocalModel(folder, manifest, spec, digests=digests), window_tokens, sequences)


def load_draft(planned: PlannedDraft, device: str, vocabulary: int) -> tuple[DraftEngine, DraftTimes]:
    """Loads it and measures it. It blocks. Raises as `LocalModel.load`."""
    model, spec = planned.model, planned.model.spec
    decoding = decoding_in(DecodingWay.RECORDED, device)
    engine = Engine(spec, device, planned.cache_bytes, decoding=decoding)
    draft = DraftEngine(
        engine,
        lambda: model.load(spec.whole, device),
        planned.window_tokens,
        vocabulary,
        replays=decoding is not None,
    )
    draft.wake()
    return draft, measured(draft, planned.sequences)


def measured(draft: DraftEngine, most_sequences: int = TRIED_SEQUENCES) -> DraftTimes:
    """What its places take: the least of some trips, for others use the machine too. Its parts have their size then."""
    alone_ms = _place_ms(draft, 1)
    beside = min(TRIED_SEQUENCES, most_sequences)
    further_ms = max(0.0, _place_ms(draft, beside) - alone_ms) / (beside - 1) if beside > 1 else 0.0
    token_ms = max(
        1e-3, _least_ms(lambda: _compute(draft, LEAST_WINDOW_TOKENS // 2)) / LEAST_WINDOW_TOKENS * 2
    )
    part_tokens = round(PART_PLACES * alone_ms / token_ms)
    draft.part_tokens = min(MOST_PART_TOKENS, max(LEAST_PART_TOKENS, part_tokens))
    return DraftTimes(alone_ms, further_ms)


def _window_of(spec: ModelSpec) -> int:
    """Of layers that see the latest tokens only no more than these, so that they can always go back."""
    windows = [window for window in spec.kv_windows if window is not None]
    return min([WINDOW_TOKENS, spec.context_length, *windows])


def _place_ms(draft: DraftEngine, sequences: int) -> float:
    """Milliseconds of one place of so many sequences together."""
    numbers = [-1 - one for one in range(sequences)]
    for number in numbers:
        draft.open(number, SamplingParams(), 0)
        draft.take(DraftOrder(number, (0,), 1))

    def guess() -> None:
        for number in numbers:
            draft.take(DraftOrder(number, (0,), 1, TRIED_GUESSES))
        while draft.waits:
            draft.guess_next()

    taken_ms = _least_ms(guess) / TRIED_GUESSES
    for number in numbers:
        draft.close(number)
    return taken_ms


def _compute(draft: DraftEngine, tokens: int) -> None:
    """Computes so many tokens of one sequence in one part."""
    draft.open(-1, SamplingParams(), 0)
    draft.take(DraftOrder(-1, (0,) * (tokens + 1), tokens + 1))
    draft.compute_next()
    draft.engine.to_host(())
    draft.close(-1)


def _least_ms(action: Callable[[], None]) -> float:
    times_s = []
    for _ in range(TRIED_TRIPS):
        begun_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - begun_s)
    return 1000 * min(times_s)
