"""Kernels that draw tokens beside the operations that they stand for, in float64."""

import itertools
from collections.abc import Callable, Iterator

import torch
from gpu.kernels.layer_shapes import Compared
from torch import Tensor

from molink.shards.sampling.drawing import Asked, DrawingKernels, LikelyTokens, likeliest_winner, race_of_all
from molink.shards.sampling.race import KEY_BITS

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
        yield lambda vocabulary=vocabulary, kind=kind: _whole(kernels, device, vocabulary, kind)  # type: ignore[misc]
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


def _whole(kernels: DrawingKernels, device: str, vocabulary: int, kind: str) -> Compared:
    logits, asked = _asked(device, vocabulary, kind)
    totals, winners = kernels.race(logits, asked)
    expected, theirs = race_of_all(logits, asked)
    off = float(((totals - expected).abs() / expected).max())
    wrong = float((winners != theirs).sum())
    return Compared(f"race of {vocabulary}, {kind}", "float64", max(off, wrong), SUM_BAR)


def _likeliest(kernels: DrawingKernels, device: str, vocabulary: int, kind: str, candidates: int) -> Compared:
    logits, asked = _asked(device, vocabulary, kind)
    order = LikelyTokens.of(logits, torch.arange(ROWS, device=device), candidates, whole=True)
    totals, _ = race_of_all(logits, asked)
    tokens, short = kernels.race_of_likeliest(order, asked, totals, vocabulary)
    theirs, expected = likeliest_winner(order, asked, totals, vocabulary)
    wrong = float((short != expected).sum() + ((tokens != theirs) & ~expected).sum())
    return Compared(f"race of {candidates} of {vocabulary}, {kind}", "float64", wrong, SUM_BAR)
