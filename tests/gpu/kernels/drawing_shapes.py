"""Kernels that draw tokens beside the operations that they stand for, in float64."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from gpu.kernels.layer_shapes import Compared
from torch import Tensor

from molink.shards.sampling.drawing import Asked, LikelyTokens, likeliest_winner
from molink.shards.sampling.race import KEY_BITS
from molink.shards.sampling.recordable import LEAST_NUCLEUS, DrawingKernels, likeliest_of_all, race_of_all

SUM_BAR = 1e-12
"""Of a row's weight, which is summed up in another order."""
VOCABULARIES = (7, 1024, 3000, 32_000, 128_256)
CANDIDATES = (1, 100, 1024, 4095)
ROWS = 12


def drawing_cases(
    kernels: DrawingKernels, device: str, *, small: bool = False
) -> Iterator[Callable[[], Compared]]:
    """Whole vocabularies, and their likeliest tokens: spread, nearly flat, and full of equals."""
    for vocabulary, kind in itertools.product(VOCABULARIES[:3] if small else VOCABULARIES, _LOGITS):
        for compare in (_largest, _whole, _nucleus):
            yield lambda compare=compare, vocabulary=vocabulary, kind=kind: compare(  # type: ignore[misc]
                kernels, device, vocabulary, kind
            )
        for candidates in CANDIDATES[:3] if small else CANDIDATES:
            yield lambda vocabulary=vocabulary, kind=kind, candidates=candidates: _likeliest(  # type: ignore[misc]
                kernels, device, vocabulary, kind, candidates
            )


_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda drawn: 5 * drawn,
    "nearly flat": lambda drawn: drawn / 100,
    "full of equals": lambda drawn: drawn.round(),
    "half left out": lambda drawn: drawn.masked_fill(drawn > 0, -torch.inf),
}


def _asked(device: str, vocabulary: int, kind: str) -> tuple[Tensor, Asked]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = _LOGITS[kind](torch.randn(ROWS, vocabulary, generator=generator)).to(device)
    top_p, top_k, temperature = (
        torch.tensor([choices[row % len(choices)] for row in range(ROWS)], dtype=torch.float64, device=device)
        for choices in (
            (1.0, 0.9, 0.5, 1e-9),
            (vocabulary, 1, min(40, vocabulary)),
            (1.0, 0.7, 1e-300, 100.0, 1.3),
        )
    )
    keys = torch.randint(2**KEY_BITS, (ROWS, 1), generator=generator).to(device)
    columns = torch.split(
        torch.stack([temperature, top_p, top_k], 1), 1, -1
    )  # as peers have them, rows apart
    peaks = logits.double().amax(-1, keepdim=True)
    return logits, Asked(peaks, columns[0], columns[1], keys, columns[2].long())


def _largest(kernels: DrawingKernels, device: str, vocabulary: int, kind: str) -> Compared:
    """With a row that is broken: its logit says so."""
    logits, _ = _asked(device, vocabulary, kind)
    logits[0, vocabulary // 2] = torch.nan
    tokens, peaks = kernels.likeliest(logits)
    theirs, expected = likeliest_of_all(logits)
    sound = torch.isfinite(expected)
    wrong = float(((tokens != theirs) & sound).sum() + ((peaks != expected) & sound).sum())
    return Compared(
        f"likeliest of {vocabulary}, {kind}", "float64", wrong + float(torch.isfinite(peaks[0])), SUM_BAR
    )


def _whole(kernels: DrawingKernels, device: str, vocabulary: int, kind: str) -> Compared:
    logits, asked = _asked(device, vocabulary, kind)
    totals, winners = kernels.race(logits, asked)
    expected, theirs = race_of_all(logits, asked)
    off = float(((totals - expected).abs() / expected).max())
    wrong = float((winners != theirs).sum())
    return Compared(f"race of {vocabulary}, {kind}", "float64", max(off, wrong), SUM_BAR)


def _nucleus(kernels: DrawingKernels, device: str, vocabulary: int, kind: str) -> Compared:
    """Beside all tokens in order. Rows of a tiny top_p need not be found; of others one in hundreds is not."""
    logits, asked = _asked(device, vocabulary, kind)
    asked = replace(asked, top_k=torch.full_like(asked.top_k, vocabulary))
    totals, winners = race_of_all(logits, asked)
    tokens, short = kernels.race_in_nucleus(logits, asked, totals, winners)
    order = LikelyTokens.of(logits, torch.arange(ROWS, device=device), vocabulary, whole=True)
    theirs, _ = likeliest_winner(order, asked, totals, vocabulary)
    large = asked.top_p >= LEAST_NUCLEUS
    wrong = float(((tokens != theirs) & ~short).sum() + (short & large).sum())
    return Compared(f"race in a nucleus of {vocabulary}, {kind}", "float64", wrong, SUM_BAR)


def _likeliest(kernels: DrawingKernels, device: str, vocabulary: int, kind: str, candidates: int) -> Compared:
    logits, asked = _asked(device, vocabulary, kind)
    order = LikelyTokens.of(logits, torch.arange(ROWS, device=device), candidates, whole=True)
    totals, _ = race_of_all(logits, asked)
    tokens, short = kernels.race_of_likeliest(order, asked, totals, vocabulary)
    theirs, expected = likeliest_winner(order, asked, totals, vocabulary)
    wrong = float((short != expected).sum() + ((tokens != theirs) & ~expected).sum())
    return Compared(f"race of {candidates} of {vocabulary}, {kind}", "float64", wrong, SUM_BAR)
