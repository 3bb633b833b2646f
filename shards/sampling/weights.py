"""Which token of a row wins the race, and where a share of its probability lies, for many rows of logits at once.
Nothing here waits for the device.

Weights are unnormalised probabilities, exp((logit - largest) / temperature). Of a whole vocabulary only the sums of
groups of neighbours are kept; a cumulative weight is looked for among the groups first, then within one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from molink.shards.sampling.race import NUMBER_STEP, race_numbers

GROUP = 512
"""Entries whose weights are kept as one sum."""
SLICE = 16 * GROUP
"""Entries of each row that a processor weighs together: they are still at hand from one operation to the next, and
so little memory beyond the logits is enough for any vocabulary."""
DEVICE_SLICE = 128 * GROUP
"""The same on other devices, where each operation costs a launch."""


def weighing_dtype(device: torch.device) -> torch.dtype:
    """In what weights are computed on that device: float64 where it can."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Of some rows of logits, each at a temperature of its own."""

    logits: Tensor
    """[any, entries], whatever order the entries are in."""
    rows: Tensor
    """[rows]: which of the logits' rows."""
    peaks: Tensor
    """[rows, 1]: the largest logit of each, in the dtype of the weights."""
    temperatures: Tensor
    """[rows, 1], above 0."""
    before: Tensor
    """[rows, groups + 1]: the weight before each group, and at last that of all."""

    @classmethod
    def of(cls, logits: Tensor, rows: Tensor, peaks: Tensor, temperatures: Tensor) -> "Weights":
        """Weighs all entries, slice by slice."""
        sums = []
        for part in torch.split(logits, _slice_of(logits), 1):
            weights = weigh(part.index_select(0, rows), peaks, temperatures)
            padded = pad(weights, (0, -part.shape[1] % GROUP))
            sums.append(torch.unflatten(padded, 1, (-1, GROUP)).sum(-1))
        return cls(logits, rows, peaks, temperatures, pad(torch.cat(sums, 1).cumsum(-1), (1, 0)))

    def part(self, start: int, stop: int) -> "Weights":
        """Those of some of the rows."""
        columns = self.rows, self.peaks, self.temperatures, self.before
        return Weights(self.logits, *(column[start:stop] for column in columns))

    @property
    def total(self) -> Tensor:
        """[rows, 1]."""
        return self.before[:, -1:]

    def reaching(self, target: Tensor) -> Tensor:
        """The first entry through which the cumulative weight is at least `target`, [rows, 1] as the target is; the
        last entry that has a weight where none does."""
        before, through = self.before[:, :-1], self.before[:, 1:]
        group = _first(through >= target, through > before)
        entries = group * GROUP + torch.arange(GROUP, device=group.device)
        last = self.logits.shape[1] - 1
        logits = self.logits[self.rows[:, None], entries.clamp(max=last)]
        weights = weigh(logits, self.peaks, self.temperatures).masked_fill_(entries > last, 0)
        cumulative = before.gather(1, group) + weights.cumsum(-1)
        return group * GROUP + _first(cumulative >= target, weights > 0)


def race_winner(logits: Tensor, rows: Tensor, peaks: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """The token whose weight wins the race, for each of these rows of logits [any, vocabulary]: [rows, 1]. Peaks,
    temperatures and keys are columns [rows, 1]."""
    best, ids, begin = [], [], 0
    for part in torch.split(logits, _slice_of(logits), 1):
        token_ids = torch.arange(begin, begin + part.shape[1], device=part.device)
        shares = raced(weigh(part.index_select(0, rows), peaks, temperatures), keys, token_ids)
        share, at = shares.max(-1, keepdim=True)
        best.append(share)
        ids.append(at + begin)
        begin += part.shape[1]
    return torch.cat(ids, 1).gather(1, torch.cat(best, 1).argmax(-1, keepdim=True))


def raced(weights: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """Weights [rows, tokens], which are overwritten, over what each token runs with: the largest of a row wins."""
    numbers = race_numbers(keys, token_ids).to(weights.dtype)
    return weights.div_(numbers.add_(0.5).mul_(-NUMBER_STEP).log1p_().neg_())


def _slice_of(logits: Tensor) -> int:
    return SLICE if logits.device.type == "cpu" else DEVICE_SLICE


def weigh(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """Unnormalised probabilities. Subtracting first keeps tiny temperatures finite."""
    return (logits - peaks).div_(temperatures).exp_()


def _first(wanted: Tensor, weighty: Tensor) -> Tensor:
    """[rows, 1]: the first that is wanted and has a weight, else the last that has one, else 0."""
    count = wanted.shape[1]
    places = torch.arange(count, device=wanted.device)
    first = torch.where(wanted & weighty, places, count).amin(-1, keepdim=True)
    return torch.minimum(first, torch.where(weighty, places, 0).amax(-1, keepdim=True))
