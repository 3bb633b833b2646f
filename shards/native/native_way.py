"""Native ways to compute: their names, what is tried of each, and the question that a loading stage asks before it uses
any. Whoever answers it runs `trial.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class NativeWay(StrEnum):
    """Native code that a product or attention may go through. Each has another way behind it, down to torch's plain
    product in float32."""

    LINEAR = "torch's product"
    ONEDNN = "oneDNN's product"
    ONEDNN_PACKED = "oneDNN's product with packed weights"
    DIVIDED = "torch's batched product"
    TORCH_BYTES = "torch's int8 product"
    ONEDNN_BYTES = "oneDNN's int8 product"
    BITSANDBYTES = "bitsandbytes' nf4 unpacking"
    BITSANDBYTES_PRODUCT = "bitsandbytes' nf4 product"
    COMPILED = "the compiled product of few rows"
    ATTENTION = "torch's fused attention"


@dataclass(frozen=True, slots=True)
class TrialJob:
    """One way with one matrix, to be tried with several numbers of rows."""

    way: str
    form: str
    """How the matrix is kept: `none`, `int8` or `nf4`."""
    dtype: str
    """The dtype of activations."""
    rows: int
    columns: int
    """The matrix's shape; of attention heads and numbers in each."""
    offset: int
    """Where its memory begins, modulo 64 bytes."""
    counts: tuple[int, ...]
    """Numbers of rows that it is multiplied by."""
    threads: int

    @property
    def subject(self) -> str:
        """The matrix, for people."""
        kept = self.dtype if self.form == "none" else f"{self.form} with {self.dtype}"
        return f"{self.rows} x {self.columns}, {kept}"


TryWays: TypeAlias = Callable[[Sequence[TrialJob]], frozenset[str]]
"""Tries what was not tried before, and returns the names of the ways that are not to be used. Blocks for seconds."""


def trust_ways(_: Sequence[TrialJob]) -> frozenset[str]:
    """Tries nothing and drops nothing: for stages that are not served."""
    return frozenset()
