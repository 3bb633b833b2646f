"""What must change no token: where a model is split, who else is in the batch, what is shared, who is preempted.

Any model in a folder is run in these ways and compared with the whole model, which computes each text at once and
without a cache. Sessions are greedy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from support.models.circuit_runs import Circuit, Run, start_run, start_sharing, step_runs
from torch import Tensor

TOKENS = 8
CHUNK = 6
"""Most tokens of a prompt in one step."""
LENGTHS = (13, 1, 19, 7, 11, 2, 17, 5)
SPLITS = (((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4)))
WHOLE = ((0, 4),)
TOLERANCE = 1e-4
"""Largest difference of float32 logits, relative to the largest logit."""

_ALIKE = ((50, 0), (50, 0), (90, 0), (32, 20), (33, 0), (0, 40))
"""Prompts of the first so many tokens of one text, and so many of another."""
ALREADY_THERE = (0, 48, 48, 32, 32, 0)
"""Tokens that each of these finds when the ones before it have ended: full blocks, of all but its last token."""
_STEPPED = 2
"""Sessions in a step where there is room for hardly more."""

Whole = Callable[[tuple[int, ...], int], Tensor]
"""Token ids to the float32 logits [so many, vocabulary] behind the last so many of them."""


@dataclass(frozen=True)
class Compared:
    """Sessions beside the whole model."""

    difference: float
    """Largest difference of logits, relative to the largest logit."""
    same_tokens: bool


def compared(runs: Sequence[Run], whole: Whole) -> Compared:
    difference, same_tokens = 0.0, True
    for run in runs:
        expected = logits_of(whole, run)
        apart = (torch.stack(run.logits) - expected).abs().max() / expected.abs().max()
        difference = max(difference, float(apart))
        same_tokens = same_tokens and run.tokens == expected.argmax(-1).tolist()
    return Compared(difference, same_tokens)


def logits_of(whole: Whole, run: Run) -> Tensor:
    """[tokens, vocabulary] that precede each generated token."""
    return whole((*run.prompt, *run.tokens[:-1]), len(run.tokens))


def ragged_prompts(vocabulary: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [_text(vocabulary, length, generator) for length in LENGTHS]


def prompts_alike(vocabulary: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(4)
    first, second = _text(vocabulary, 90, generator), _text(vocabulary, 40, generator)
    return [first[:count] + second[:more] for count, more in _ALIKE]


def _text(vocabulary: int, length: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist())


def join(circuit: Circuit, prompts: Sequence[tuple[int, ...]]) -> list[Run]:
    """One more session joins at every second step."""
    runs = [start_run(circuit, prompt, TOKENS, chunk=CHUNK) for prompt in prompts]
    step = 0
    while any(len(run.tokens) < TOKENS for run in runs):
        step_runs(circuit, [run for run in runs[: 1 + step // 2] if len(run.tokens) < TOKENS])
        step += 1
    _end(runs)
    return runs


def shares_prefixes(circuit: Circuit) -> bool:
    """Whether beginnings that sessions have in common are computed once: where a layer keeps a state, nobody knows
    what it was behind them."""
    return not any(layout.states for engine, span in circuit for layout in engine.new_cache(span, 1).layouts)


def share(circuit: Circuit, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Run], tuple[int, ...]]:
    """Sessions after one another, and then all at once; and what each of the former found already there."""
    _forget(circuit)
    runs, found = [], []
    for prompt in prompts:
        run = start_sharing(circuit, prompt, TOKENS, CHUNK)
        found.append(run.fed)
        runs.append(run)
        while len(run.tokens) < TOKENS:
            step_runs(circuit, [run])
    together = [start_sharing(circuit, prompt, TOKENS, CHUNK) for prompt in prompts]
    while waiting := [run for run in together if len(run.tokens) < TOKENS]:
        step_runs(circuit, waiting)
    _end(runs + together)
    _check(circuit)
    return runs + together, tuple(found)


def preempt(circuit: Circuit, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Run], list[int]]:
    """Sessions that step in turns where there is room for no more than those of one step, and share what they can;
    and how often each hop that keeps something moved one of them to the host's memory."""
    needed = _most_bytes(circuit, max(prompts, key=len))
    _forget(circuit)
    for (engine, _), most_bytes in zip(circuit, needed, strict=True):
        assert engine.pool.limit(_STEPPED * most_bytes)
    runs = [start_sharing(circuit, prompt, TOKENS, CHUNK, reserve=False) for prompt in prompts]
    waiting, moved = runs, [0] * len(circuit)
    while waiting:
        held = [
            [run.caches[hop] for run in waiting if run.caches[hop].holds_blocks]
            for hop in range(len(circuit))
        ]
        step_runs(circuit, waiting[:_STEPPED])
        moved = [
            count + sum(not cache.holds_blocks for cache in hop)
            for count, hop in zip(moved, held, strict=True)
        ]
        turned = waiting[_STEPPED:] + waiting[:_STEPPED]
        waiting = [run for run in turned if len(run.tokens) < TOKENS]
        _end([run for run in turned if len(run.tokens) == TOKENS])
    _check(circuit)
    for engine, _ in circuit:
        engine.pool.limit(None)
    return runs, [count for count, most_bytes in zip(moved, needed, strict=True) if most_bytes]


def _most_bytes(circuit: Circuit, prompt: tuple[int, ...]) -> list[int]:
    """What one session alone takes of each hop's memory at most."""
    capacity = len(prompt) + TOKENS
    caches = [engine.new_cache(span, capacity, reserve=False) for engine, span in circuit]
    run, most = Run(prompt, caches, CHUNK), [0] * len(circuit)
    while len(run.tokens) < TOKENS:
        step_runs(circuit, [run])
        most = [max(one, cache.nbytes) for one, cache in zip(most, caches, strict=True)]
    _end([run])
    return most


def _end(runs: Sequence[Run]) -> None:
    for cache in (cache for run in runs for cache in run.caches):
        cache.close()


def _forget(circuit: Circuit) -> None:
    for engine, span in circuit:
        engine.pool.forget(span)


def _check(circuit: Circuit) -> None:
    for engine, _ in circuit:
        engine.pool.check_integrity()


@dataclass(frozen=True)
class Rounded:
    """Sessions in bfloat16 beside the whole model in bfloat16, and that one beside the one in float32."""

    positions: int
    clear: int
    """Positions whose best two logits lie further apart than twice the difference of their logits."""
    clear_alone: int
    """Positions whose best two logits lie further apart than twice what rounding did to the whole model."""
    wrong: int
    """Of those that are clear, where another token was generated."""
    ours: float
    """Mean difference to the whole model in bfloat16."""
    theirs: float
    """Mean difference of that one to float32: what rounding does by itself."""


def rounded(runs: Sequence[Run], whole: Whole, exact: Whole) -> Rounded:
    clear, clear_alone, wrong, ours, theirs = 0, 0, 0, [], []
    for run in runs:
        expected = logits_of(whole, run)
        differences = (torch.stack(run.logits) - expected).abs().amax(-1)
        margins = expected.topk(2).values.diff().abs().flatten()
        certain = margins > 2 * differences
        clear += int(certain.sum())
        wrong += int((expected.argmax(-1) != torch.tensor(run.tokens))[certain].sum())
        by_rounding = (logits_of(exact, run) - expected).abs().amax(-1)
        clear_alone += int((margins > 2 * by_rounding).sum())
        ours += differences.tolist()
        theirs += by_rounding.tolist()
    return Rounded(len(ours), clear, clear_alone, wrong, sum(ours) / len(ours), sum(theirs) / len(theirs))
