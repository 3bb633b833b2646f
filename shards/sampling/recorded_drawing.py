"""The next tokens of all rows in one launch: a drawing is some hundred small operations, and to launch each from Python
takes longer than the device needs for all of them."""

import logging
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from molink.shards.device.cuda_graphs import Recorder
from molink.shards.device.device import Device
from molink.shards.device.transfers import Staging
from molink.shards.errors import in_one_line
from molink.shards.sampling.drawing import Asked, Pick, candidates_on
from molink.shards.sampling.race import KEY_BITS
from molink.shards.sampling.recordable import Cuts, DrawingKernels, cuts_of, draw_any
from molink.shards.sampling.weights import weighing_dtype

_SETTINGS = 5
"""Numbers that say how a row is drawn: temperature, top_p, top_k, the two halves of the race's key."""
_HALF_KEY = 1 << (KEY_BITS // 2)
"""Halves are below it: exact in float32 too."""
_log = logging.getLogger(__name__)


class RecordedDrawing:
    """Drawings of logits of one vocabulary, recorded at a few numbers of rows. Used from the engine's thread."""

    def __init__(
        self,
        vocabulary: int,
        sizes: Sequence[int],
        device: Device,
        recorder: Recorder,
        kernels: DrawingKernels | None = None,
    ) -> None:
        """`sizes` ascend; the largest is the most rows that are drawn so."""
        self._vocabulary = vocabulary
        self._sizes = tuple(sizes)
        self._device = device
        self._recorder: Recorder | None = recorder
        self._kernels = kernels
        self._replays: dict[tuple[int, Cuts], Callable[[], Tensor]] = {}
        """By number of rows and what they draw from: to put the likeliest tokens in order takes longest."""
        self._logits: Tensor | None = None
        """[most rows, vocabulary], in memory that stays."""
        self._settings: Staging | None = None

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Records drawings of one more number of rows in one more way; whether there was one. Not while a step is
        under way."""
        ways = Cuts if self._kernels else (Cuts.WHOLE, Cuts.LIKELIEST)
        every = product(self._sizes, ways)
        kind = next((kind for kind in every if kind not in self._replays), None)
        if kind is None or self._recorder is None:
            return False
        try:
            replay = self._recorder.record(self._drawing_of(*kind))
            replay()
            self._device.wait()
        except Exception as error:  # noqa: BLE001 - drivers and compilers raise what they like: the next way needs neither
            self._give_up(error)
        else:
            self._replays[kind] = replay
        return True

    def forget(self) -> None:
        """Gives back the memory of what has been recorded."""
        self._replays.clear()
        self._logits = self._settings = None

    @torch.inference_mode()
    def draw(self, logits: Tensor, picks: Sequence[Pick]) -> Tensor | None:
        """As `drawing.draw(...).packed(...)` of rows of which none wants log-probabilities, with as many candidates as
        there are at first. None where no such drawing has been recorded."""
        rows = len(picks)
        size = next((size for size in self._sizes if size >= rows), None)
        cuts = cuts_of(picks, self._vocabulary, has_kernels=self._kernels is not None)
        replay = None if size is None else self._replays.get((size, cuts))
        staged, settings = self._logits, self._settings
        if replay is None or staged is None or settings is None:
            return None
        if logits.shape[1] != self._vocabulary or any(pick.logprobs is not None for pick in picks):
            return None
        staged[:rows].copy_(logits)
        self._fill(settings, picks)
        try:
            return replay()[:, :rows].flatten().clone()  # the next drawing writes over what it gave
        except Exception as error:  # noqa: BLE001 - as above; the same rows are drawn the next way
            self.forget()
            self._give_up(error)
            return None

    def _give_up(self, reason: Exception) -> None:
        """No further drawings are recorded; what has been recorded stays."""
        self._recorder = None
        _log.warning("tokens are drawn one operation at a time: recording ended with %s", in_one_line(reason))

    def _fill(self, settings: Staging, picks: Sequence[Pick]) -> None:
        host = settings.host()
        least = torch.finfo(host.dtype).tiny
        asked = [
            (max(pick.temperature, least) if pick.temperature else 0.0, pick.top_p,
             pick.top_k or self._vocabulary, *divmod(pick.key, _HALF_KEY))
            for pick in picks
        ]  # fmt: skip
        host.numpy()[: len(asked)] = asked
        settings.send(len(asked))

    def _drawing_of(self, size: int, cuts: Cuts) -> Callable[[], Tensor]:
        """Rows of nobody are drawn as all others are."""
        if self._logits is None or self._settings is None:
            most, dtype = self._sizes[-1], weighing_dtype(self._device.place)
            self._logits = torch.zeros(most, self._vocabulary, device=self._device.place)
            self._settings = Staging((most, _SETTINGS), dtype, self._device)
            nobodys = (0.0, 1.0, self._vocabulary, 0.0, 0.0)
            self._settings.host()[:] = torch.tensor(nobodys, dtype=dtype)
            self._settings.send()
        logits, settings = self._logits[:size], self._settings.on_device[:size]
        temperature, top_p, top_k, high, low = torch.split(settings, 1, -1)

        def drawing() -> Tensor:
            key = high.long() * _HALF_KEY + low.long()
            asked = Asked(temperature, temperature, top_p, key, top_k.long())
            drawn = draw_any(logits, asked, candidates_on(logits.device), cuts=cuts, kernels=self._kernels)
            return drawn.packed(settings.dtype).view(-1, size)

        return drawing
