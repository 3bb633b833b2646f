"""Native ways to compute: their names, what is tried of each, and the question that a loading stage asks before it uses
any. Whoever answers it runs `trial.py`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


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
    library: str = ""
    """Name of the compiled library, by its contents, where the way goes through it."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "TrialJob":
        """The job with these fields, as JSON has them. Raises TypeError, KeyError or ValueError where they are none."""
        return cls(**{**fields, "counts": tuple(map(int, fields["counts"]))})

    @property
    def subject(self) -> str:
        """The matrix, for people."""
        kept = self.dtype if self.form == "none" else f"{self.form} with {self.dtype}"
        return f"{self.rows} x {self.columns}, {kept}"


class WaysTrial(Protocol):
    """Questions that a loading stage asks before it uses native code. Threads may share it."""

    def try_ways(self, jobs: Sequence[TrialJob]) -> frozenset[str]:
        """Names of the ways that are not to be used; what was not tried before is tried, which takes seconds."""
        ...

    def try_library(self) -> bool:
        """True if the compiled library, which has come since, may be used for the matrices of earlier jobs."""
        ...

    def chose(self, names: Collection[str]) -> None:
        """Notes which ways were fastest for the matrices of a stage."""
        ...


class TrustedWays:
    """Tries nothing and drops nothing: for stages that are not served."""

    def try_ways(self, _: Sequence[TrialJob]) -> frozenset[str]:
        return frozenset()

    def try_library(self) -> bool:
        return True

    def chose(self, _: Collection[str]) -> None:
        """Nobody reads it."""
