"""Kernels that draw tokens: used where they draw what the operations that they stand for draw."""

import importlib.util
import logging
from dataclasses import replace

import torch
from torch import Tensor

from molink.shards.errors import in_one_line
from molink.shards.sampling.drawing import Asked, candidates_on
from molink.shards.sampling.race import KEY_BITS
from molink.shards.sampling.recordable import Cuts, DrawingKernels, draw_any
from molink.shards.sampling.weights import weighing_dtype

_TRIED_ROWS = 6
_TRIED_TOKENS = 6000
"""More than are put in order at first, so that the kernels are those that will draw."""
_log = logging.getLogger(__name__)


def drawing_kernels_on(device: torch.device) -> DrawingKernels | None:
    """On CUDA devices, where torch brings a Triton along that works; None elsewhere. Whatever the compiler raises, or
    other tokens than those of the operations, in one line of the log, leaves drawings to the operations."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        from molink.shards.kernels.triton_drawing import TritonDrawing

        return checked(TritonDrawing(), device)
    except Exception as error:  # noqa: BLE001 - of a compiler and its cards there is no list of errors
        _log.warning("tokens are drawn without kernels: they end with %s", in_one_line(error))
        return None


@torch.inference_mode()
def checked(kernels: DrawingKernels, device: torch.device) -> DrawingKernels | None:
    """The same, if they draw what operations draw of random rows: cut by top_p, by top_k, by neither."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(_TRIED_ROWS, _TRIED_TOKENS, generator=generator)
    keys = torch.randint(2**KEY_BITS, (_TRIED_ROWS, 1), generator=generator)
    dtype, most = weighing_dtype(device), _TRIED_TOKENS

    def column(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)[:, None]

    temperatures = column(0.0, 1.0, 1.0, 0.7, 0.7, 1.5)
    top_p, top_k = column(1.0, 1.0, 0.9, 1.0, 0.5, 0.999), column(most, most, most, 40, 200, most)
    asked = Asked(temperatures, temperatures, top_p, keys.to(device), top_k.long())
    rows = logits.to(device)
    ours, theirs = (draw_any(rows, asked, candidates_on(device), kernels=one) for one in (kernels, None))
    same = bool((ours.tokens == theirs.tokens).all()) and bool((ours.unsettled == theirs.unsettled).all())
    unlimited = replace(asked, top_k=torch.full_like(asked.top_k, most))
    ours = draw_any(rows, unlimited, candidates_on(device), cuts=Cuts.NUCLEUS, kernels=kernels)
    theirs = draw_any(rows, unlimited, candidates_on(device))
    same = same and bool((ours.unsettled | theirs.unsettled | (ours.tokens == theirs.tokens)).all())
    if not same:
        _log.warning("tokens are drawn without kernels: they draw others on %s", device)
    return kernels if same else None
