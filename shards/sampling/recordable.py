"""Drawings by operations that depend on the shape of the logits alone, so that a device can record them: each row is
drawn in all ways that a step asks for, and what it asked for itself says which one counts."""

from collections.abc import Iterable
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from molink.shards.sampling.drawing import Asked, Drawn, LikelyTokens, Pick, likeliest_winner
from molink.shards.sampling.weights import Weights, race_winner


class DrawingKernels(Protocol):
    """Parts of a drawing that a device has kernels of its own for. Nothing waits."""

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row, the lowest among equals, and its logit: [rows, 1] each. The logit of a row
        with NaN is NaN or an infinity."""
        ...

    def race(self, logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """The weight of each row's whole vocabulary, and the token that wins the race in it: [rows, 1] each."""
        ...

    def race_of_likeliest(
        self, order: LikelyTokens, asked: Asked, totals: Tensor, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """As `likeliest_winner`."""
        ...

    def race_in_nucleus(
        self, logits: Tensor, asked: Asked, totals: Tensor, winners: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The token of each row that wins among what top_p leaves of its whole vocabulary, and whether it has not been
        found, [rows, 1] each. `totals` and `winners` are those of `race`."""
        ...


class Cuts(Enum):
    """What the rows of a step draw from, of which no row asks for more."""

    WHOLE = auto()
    """Their whole vocabularies."""
    NUCLEUS = auto()
    """What top_p leaves of these, if it leaves a good deal: nothing is put in order. With kernels alone."""
    LIKELIEST = auto()
    """Some of the likeliest tokens, in order, for top_p and top_k."""


LEAST_NUCLEUS = 0.5
"""The least top_p for which `race_in_nucleus` is quicker than order: what wins in a whole vocabulary is one of the
nucleus with about this probability."""


def cuts_of(picks: Iterable[Pick], vocabulary: int, *, has_kernels: bool) -> Cuts:
    """What rows draw from that are drawn together."""
    cuts = Cuts.WHOLE
    for pick in picks:
        if pick.temperature > 0 and (0 < pick.top_k < vocabulary or pick.top_p < LEAST_NUCLEUS):
            return Cuts.LIKELIEST
        if pick.temperature > 0 and pick.top_p < 1:
            cuts = Cuts.NUCLEUS if has_kernels else Cuts.LIKELIEST
    return cuts


def draw_any(
    logits: Tensor,
    asked: Asked,
    candidates: int,
    *,
    cuts: Cuts = Cuts.LIKELIEST,
    kernels: DrawingKernels | None = None,
) -> Drawn:
    """As `draw` of rows that want no log-probabilities, by operations that depend on the shape of the logits alone, so
    that they can be recorded: each row is drawn in all ways that `cuts` names, and what it asked for says which one
    counts."""
    vocabulary = logits.shape[1]
    order = None
    if cuts is Cuts.LIKELIEST or (cuts is Cuts.NUCLEUS and kernels is None):
        every = torch.arange(len(logits), device=logits.device)
        order = LikelyTokens.of(logits, every, candidates, whole=True)
        tokens, peaks = order.ids[:, :1], order.logits[:, :1]
    else:
        tokens, peaks = (kernels.likeliest if kernels else likeliest_of_all)(logits)
    draws = asked.temperature > 0
    asked = replace(
        asked,
        peaks=peaks.to(asked.temperature.dtype),
        temperature=torch.where(draws, asked.temperature, 1),
    )
    totals, plain = (kernels.race if kernels else race_of_all)(logits, asked)
    chosen = torch.where(draws, plain, tokens)
    if order is None:
        if cuts is Cuts.WHOLE or kernels is None:
            return Drawn(chosen, asked.peaks, torch.zeros_like(draws), None)
        among, unsettled = kernels.race_in_nucleus(logits, asked, totals, plain)
        is_cut = draws & (asked.top_p < 1)
        return Drawn(torch.where(is_cut, among, chosen), asked.peaks, is_cut & unsettled, None)
    race = kernels.race_of_likeliest if kernels else likeliest_winner
    among, unsettled = race(order, asked, totals, vocabulary)
    is_cut = draws & ((asked.top_p < 1) | (asked.top_k < vocabulary))
    flat = order.tied & (peaks == order.logits[:, -1:])  # the lowest id of the equals may not be among them
    short = torch.where(is_cut, unsettled, flat & ~draws)
    return Drawn(torch.where(is_cut, among, chosen), asked.peaks, short, None)


def likeliest_of_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `DrawingKernels.likeliest`, operation by operation."""
    tokens = logits.argmax(-1, keepdim=True)
    return tokens, logits.gather(1, tokens)


def race_of_all(logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """As `DrawingKernels.race`, operation by operation."""
    every = torch.arange(len(logits), device=logits.device)
    whole = Weights.of(logits, every, asked.peaks, asked.temperature)
    return whole.total, race_winner(logits, every, asked.peaks, asked.temperature, asked.key)
