"""The next token of many rows of logits at once, in a number of operations that does not depend on how many they are.
Nothing here waits for the device: the results lie there until somebody reads them.

Rows that need the order of their vocabulary get their likeliest tokens in order. Where these turn out not to be enough,
the result says so, and the row is to be drawn again from all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from molink.shards.sampling.weights import Weights, race_winner, raced, weigh

_CANDIDATES = 1024
"""Likeliest tokens that are put in order for top_k and top_p, before all are."""
_DEVICE_CANDIDATES = 4095
"""The same on other devices than processors, where putting all in order takes some thirty times as long: one fewer than
CUDA's library puts in order within one block."""
_TOLD_CANDIDATES = 32
"""The same where they are only told, or cut to few by top_k: SamplingParams tells 20."""


def candidates_on(device: torch.device) -> int:
    """How many of the likeliest tokens are put in order at first."""
    return _CANDIDATES if device.type == "cpu" else _DEVICE_CANDIDATES


class Pick(NamedTuple):
    """How one row's token is chosen; the fields are those of `SamplingParams`. A tuple, since each row of each step has
    one, and a dataclass takes five times as long to make."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs: int | None = None
    key: int = 0
    """Of the race that the token is drawn in."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What was chosen, on the device."""

    tokens: Tensor
    """[rows, 1]."""
    peaks: Tensor
    """[rows, 1]: the largest logit; NaN or an infinity says that the row is broken."""
    unsettled: Tensor
    """[rows, 1]: whether the candidates were not enough, so that the row's other numbers mean nothing."""
    told: Tensor | None
    """[picks that want log-probabilities, 1 + 2 * most]: the token's, the ids of the likeliest tokens, and theirs;
    `most` are those of the pick that wants most."""

    def packed(self, dtype: torch.dtype) -> Tensor:
        """All as one vector, in the order of the fields; ids below 2**24 are exact in float32."""
        parts = [self.tokens, self.peaks, self.unsettled, *([] if self.told is None else [self.told])]
        return torch.cat([part.to(dtype).flatten() for part in parts])


def most_told(picks: Iterable[Pick], vocabulary: int) -> int:
    """Of how many tokens the pick that wants most wants log-probabilities; there are no more than the vocabulary."""
    return min(vocabulary, max((pick.logprobs or 0 for pick in picks), default=0))


def on_device(lists: Sequence[Sequence[float]], dtype: torch.dtype, like: Tensor) -> tuple[Tensor, ...]:
    """Each list on the device of that tensor, in one copy that waits for nothing."""
    host = torch.tensor([*chain.from_iterable(lists)], dtype=dtype)
    if like.is_cuda:
        host = host.pin_memory()  # what is not pinned waits for all that the device has been given
    return torch.split(host.to(like.device, non_blocking=True), [len(one) for one in lists])


def draw(
    logits: Tensor,
    picks: Sequence[Pick],
    candidates: int,
    dtype: torch.dtype,
    told_of: Tensor | None = None,
) -> Drawn:
    """One token for each row of float32 logits [rows, vocabulary]; weights are computed in `dtype`.

    Where order is needed so many candidates are put in order, or all; top_k is at most as large, or at least the
    vocabulary. Log-probabilities are those of the logits `told_of`, if they are others.
    """
    if told_of is not None and any(pick.logprobs is not None for pick in picks):
        return _draw_and_tell(logits, picks, candidates, dtype, told_of)
    tokens = logits.argmax(-1, keepdim=True)
    peaks = logits.gather(1, tokens)
    unsettled = torch.zeros_like(tokens, dtype=torch.bool)
    told = None
    kinds = _Kinds.of(picks, logits.shape[1])
    if kinds.plain or kinds.ordered:
        rows = _Rows.sent(kinds, picks, logits, peaks, dtype)
        opens = len(kinds.open)
        if kinds.plain:
            asked = rows.asked.part(rows.plain)
            tokens[rows.plain] = race_winner(logits, rows.plain, asked.peaks, asked.temperature, asked.key)
        if kinds.weighed:
            whole = Weights.of(logits, rows.weighed, rows.asked.peaks[rows.weighed], rows.weighed_at)
        if kinds.ordered:
            if not kinds.open and candidates < logits.shape[1]:
                most = max((picks[row].top_k for row in kinds.limited), default=0)
                candidates = min(candidates, max(_TOLD_CANDIDATES, 2 * most))
            whole_batch = kinds.ordered == list(range(len(picks)))
            order = LikelyTokens.of(logits, rows.ordered, candidates, whole=whole_batch)
        if kinds.cut:
            totals = rows.asked.peaks.new_zeros(len(kinds.cut), 1)
            if opens:
                totals[:opens] = whole.part(0, opens).total
            tokens[rows.cut], unsettled[rows.cut] = likeliest_winner(
                order.part(slice(len(kinds.cut))), rows.asked.part(rows.cut), totals, logits.shape[1]
            )
        if kinds.told:
            totals = whole.part(opens, len(kinds.weighed)).total
            told, short = _told(logits, order, rows, tokens, totals, most_told(picks, logits.shape[1]))
            unsettled[rows.told] |= short
    return Drawn(tokens, peaks, unsettled, told)


def _draw_and_tell(
    logits: Tensor, picks: Sequence[Pick], candidates: int, dtype: torch.dtype, told_of: Tensor
) -> Drawn:
    """As `draw`: the tokens of the ones, the log-probabilities of the others."""
    drawn = draw(logits, [pick._replace(logprobs=None) for pick in picks], candidates, dtype)
    telling = [Pick(logprobs=pick.logprobs) for pick in picks]
    kinds = _Kinds.of(telling, told_of.shape[1])
    peaks = told_of.amax(-1, keepdim=True)
    rows = _Rows.sent(kinds, telling, told_of, peaks, dtype)
    totals = Weights.of(told_of, rows.told, rows.asked.peaks[rows.told], rows.weighed_at).total
    if candidates < told_of.shape[1]:
        candidates = _TOLD_CANDIDATES
    whole_batch = kinds.told == list(range(len(picks)))
    order = LikelyTokens.of(told_of, rows.told, candidates, whole=whole_batch)
    told, short = _told(told_of, order, rows, drawn.tokens, totals, most_told(picks, told_of.shape[1]))
    unsettled = drawn.unsettled.clone()
    unsettled[rows.told] |= short
    return Drawn(drawn.tokens, drawn.peaks, unsettled, told)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """How some rows are drawn, on the device, as columns [rows, 1]."""

    peaks: Tensor
    """Their largest logits."""
    temperature: Tensor
    top_p: Tensor
    key: Tensor
    top_k: Tensor
    """As large as the vocabulary where there is no limit."""

    def part(self, rows: Tensor) -> "Asked":
        """That of some of the rows."""
        columns = self.peaks, self.temperature, self.top_p, self.key, self.top_k
        return Asked(*(column[rows] for column in columns))


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Which rows are treated how."""

    plain: list[int]
    """Draw from the whole vocabulary."""
    open: list[int]
    """Draw from what top_p leaves of all."""
    limited: list[int]
    """Draw from what top_p leaves of top_k."""
    told: list[int]
    """Want log-probabilities."""

    @classmethod
    def of(cls, picks: Sequence[Pick], vocabulary: int) -> "_Kinds":
        kinds = cls([], [], [], [])
        for row, pick in enumerate(picks):
            if pick.temperature > 0:
                limited = 0 < pick.top_k < vocabulary
                (kinds.limited if limited else kinds.open if pick.top_p < 1 else kinds.plain).append(row)
            if pick.logprobs is not None:
                kinds.told.append(row)
        return kinds

    @property
    def cut(self) -> list[int]:
        return self.open + self.limited

    @property
    def weighed(self) -> list[int]:
        """Those of whose whole vocabulary the weight is summed up."""
        return self.open + self.told

    @property
    def ordered(self) -> list[int]:
        """Those whose likeliest tokens are put in order: first those that are cut."""
        return list(dict.fromkeys(self.cut + self.told))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The same on the device, and what was asked for all rows, as columns [rows, 1]."""

    plain: Tensor
    cut: Tensor
    told: Tensor
    weighed: Tensor
    ordered: Tensor
    told_places: Tensor
    """Where those told are among those ordered."""
    weighed_at: Tensor
    """[weighed, 1]: temperatures; those told are weighed at 1."""
    asked: Asked
    wanted: Tensor
    """How many of the likeliest tokens."""

    @classmethod
    def sent(
        cls, kinds: _Kinds, picks: Sequence[Pick], logits: Tensor, peaks: Tensor, dtype: torch.dtype
    ) -> "_Rows":
        """Two copies to the device."""
        places = {row: at for at, row in enumerate(kinds.ordered)}
        lists = kinds.plain, kinds.cut, kinds.told, kinds.ordered, [places[row] for row in kinds.told]
        counts = [pick.top_k or logits.shape[1] for pick in picks], [pick.logprobs or 0 for pick in picks]
        keys = [pick.key for pick in picks]
        plain, cut, told, ordered, told_places, top_k, wanted, key = on_device(
            (*lists, *counts, keys), torch.long, logits
        )
        least = torch.finfo(dtype).tiny  # in float32 smaller ones would be 0
        settings = [max(pick.temperature, least) for pick in picks], [pick.top_p for pick in picks]
        temperature, top_p = on_device(settings, dtype, logits)
        opens = cut[: len(kinds.open)]
        ones = torch.ones_like(told, dtype=dtype)
        return cls(
            plain, cut, told, torch.cat([opens, told]), ordered, told_places,
            torch.cat([temperature[opens], ones])[:, None],
            Asked(peaks.to(dtype), temperature[:, None], top_p[:, None], key[:, None], top_k[:, None]),
            wanted[:, None],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class LikelyTokens:
    """The likeliest tokens of some rows, likeliest first, the lowest id first among equals."""

    logits: Tensor
    """[rows, candidates]."""
    ids: Tensor
    """[rows, candidates]."""
    tied: Tensor
    """[rows, 1]: whether others are as likely as the last, so that those as likely as it may be the wrong ones."""
    partial: bool
    """Whether there are others at all."""

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor, candidates: int, *, whole: bool) -> "LikelyTokens":
        """Of these rows, which may be known to be the `whole` of the logits in order."""
        among = logits if whole else logits.index_select(0, rows)
        if candidates >= logits.shape[1]:
            likely = among.sort(dim=-1, descending=True, stable=True)
            return cls(
                likely.values, likely.indices, torch.zeros_like(rows, dtype=torch.bool)[:, None], False
            )
        ids = among.topk(candidates + 1, sorted=False).indices.sort(-1).values
        likely = among.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        values, ids = likely.values, ids.gather(1, likely.indices)
        tied = values[:, -2:-1] == values[:, -1:]
        return cls(values[:, :-1], ids[:, :-1], tied, True)

    def part(self, rows: Tensor | slice) -> "LikelyTokens":
        """That of some of the rows."""
        return LikelyTokens(self.logits[rows], self.ids[rows], self.tied[rows], self.partial)

    def short(self, last: Tensor) -> Tensor:
        """[rows, 1]: whether the order up to place `last` [rows, 1] is not certain."""
        return self.tied & (self.logits.gather(1, last) == self.logits[:, -1:])


def likeliest_winner(
    order: LikelyTokens, asked: Asked, totals: Tensor, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Tokens [rows, 1] of rows that draw from a part of the vocabulary, and whether their candidates were too few.

    The part is the smallest set of most likely tokens whose probability, among top_k or all, reaches top_p (Holtzman et
    al. 2020, The Curious Case of Neural Text Degeneration, section 3.1). `totals` are the weights of the whole
    vocabulary, of those rows that top_k does not limit.
    """
    places = torch.arange(order.ids.shape[1], device=order.ids.device)
    kept = order.logits.masked_fill(places >= asked.top_k, -torch.inf)
    among = torch.arange(len(kept), device=kept.device)
    weights = Weights.of(kept, among, asked.peaks, asked.temperature)
    target = asked.top_p * torch.where(asked.top_k < vocabulary, weights.total, totals)
    last = weights.reaching(target)
    shares = raced(weigh(kept, asked.peaks, asked.temperature), asked.key, order.ids)
    place = shares.masked_fill_(places > last, 0).argmax(-1, keepdim=True)
    short = order.short(last) | (order.partial & (weights.total < target))
    return order.ids.gather(1, place), short


def _told(
    logits: Tensor, order: LikelyTokens, rows: _Rows, tokens: Tensor, totals: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """`Drawn.told`, and of which rows [told, 1] the order is not certain. `totals` are weights at temperature 1."""
    own = order.part(rows.told_places)
    last = (rows.wanted[rows.told] - 1).clamp(0, own.ids.shape[1] - 1)
    chosen = torch.cat([logits[rows.told].gather(1, tokens[rows.told]), own.logits[:, :most]], 1)
    logprobs = chosen - rows.asked.peaks[rows.told] - totals.log()
    told = torch.cat([logprobs[:, :1], own.ids[:, :most].to(logprobs.dtype), logprobs[:, 1:]], 1)
    return told, own.short(last)
