"""What a request makes of its row's logits before a token is drawn: bias, penalties, masks, and min_p.

Each is done for all rows of a step at once, rows that ask for none of it are not touched, and nothing here waits for
the device.
"""

import math
from collections.abc import Container, Sequence

import numpy as np
import torch
from torch import Tensor

from molink.shards.sampling.drawing import on_device
from molink.shards.sampling.sample_request import SampleRequest

_BITS = 8


def with_bias(logits: Tensor, requests: Sequence[SampleRequest], without: Container[int]) -> Tensor:
    """The logits with each row's bias; rows in `without` stay as they are."""
    biases = [
        (row, token, bias)
        for row, request in enumerate(requests)
        if row not in without
        for token, bias in request.params.logit_bias
    ]
    if not biases:
        return logits
    rows, tokens, added = zip(*biases, strict=True)
    at = on_device((rows, tokens), torch.long, logits)
    (values,) = on_device((added,), logits.dtype, logits)
    return logits.index_put(at, values, accumulate=True)


def constrain(logits: Tensor, requests: Sequence[SampleRequest]) -> None:
    """Changes the float32 logits [rows, vocabulary] into those that the requests draw from, one for each row: penalties
    first, then what is not to be drawn, and last what min_p cuts off the rest."""
    _penalise(logits, requests)
    _leave_out(logits, requests)
    _keep_allowed(logits, requests)
    _cut_unlikely(logits, requests)


def _penalise(logits: Tensor, requests: Sequence[SampleRequest]) -> None:
    """Repetition (Keskar et al. 2019), then frequency and presence, of each row's own tokens."""
    rows, ids, divisors, taken = [], [], [], []
    for row, request in enumerate(requests):
        seen, params = request.seen, request.params
        if seen is None or not len(seen.ids):
            continue
        rows.append(np.full(len(seen.ids), row))
        ids.append(seen.ids)
        divisors.append(np.where(seen.in_sequence > 0, params.repetition_penalty, 1.0))
        taken.append(
            params.frequency_penalty * seen.generated + params.presence_penalty * (seen.generated > 0)
        )
    if not rows:
        return
    at = _sent(np.concatenate(rows), torch.long, logits), _sent(np.concatenate(ids), torch.long, logits)
    divisor = _sent(np.concatenate(divisors), logits.dtype, logits)
    values = logits[at]
    values = torch.where(values < 0, values * divisor, values / divisor)
    logits.index_put_(at, values - _sent(np.concatenate(taken), logits.dtype, logits))


def _leave_out(logits: Tensor, requests: Sequence[SampleRequest]) -> None:
    pairs = [(row, token) for row, request in enumerate(requests) for token in request.left_out]
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        at = on_device((rows, tokens), torch.long, logits)
        logits.index_put_(at, logits.new_full((1,), -math.inf))


def _keep_allowed(logits: Tensor, requests: Sequence[SampleRequest]) -> None:
    masks = [(row, one.allowed) for row, one in enumerate(requests) if one.allowed is not None]
    if not masks:
        return
    vocabulary = logits.shape[1]
    most = -(-vocabulary // _BITS)
    words = np.zeros((len(masks), most), dtype=np.uint8)
    for mask, (_, allowed) in zip(words, masks, strict=True):
        given = np.frombuffer(allowed, dtype=np.uint8)[:most]
        mask[: len(given)] = given
    bits = _sent(words, torch.uint8, logits)
    places = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
    forbidden = (bits[:, :, None] >> places & 1).flatten(1)[:, :vocabulary] == 0
    rows = _sent(np.array([row for row, _ in masks]), torch.long, logits)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -math.inf))


def _cut_unlikely(logits: Tensor, requests: Sequence[SampleRequest]) -> None:
    """A token is at least `min_p` times as likely as the likeliest where its logit is so little below the largest."""
    reach = [_reach(request) for request in requests]
    if any(one < math.inf for one in reach):
        (below,) = on_device((reach,), logits.dtype, logits)
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) - below[:, None], -math.inf)


def _reach(request: SampleRequest) -> float:
    params = request.params
    if not params.min_p or not params.temperature:
        return math.inf
    return -params.temperature * math.log(params.min_p)


def _sent(
    numbers: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", dtype: torch.dtype, like: Tensor
) -> Tensor:
    """On the device of that tensor, in a copy that waits for nothing."""
    host = torch.from_numpy(numbers).to(dtype)
    if like.is_cuda:
        host = host.pin_memory()
    return host.to(like.device, non_blocking=True)
