"""Why weights cannot be served: each is a `ValueError` with fields, not only prose. And how errors are told."""

from collections.abc import Iterable
from pathlib import Path

from molink.requirements import untried

_NAMED = 6


def name_some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def in_one_line(error: Exception, most: int = 300) -> str:
    """The error's class and words, no more characters of these than `most`."""
    words = " ".join(str(error).split())
    words = words if len(words) <= most else f"{words[:most]}..."
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


class WeightsError(ValueError):
    """The folder does not hold what the span needs, or not in a form that can be served.

    `tensors` are the names that are missing or wrong, empty where the trouble is not with single tensors.
    """

    def __init__(self, folder: Path, message: str, tensors: Iterable[str] = ()) -> None:
        super().__init__(f"{folder}: {message}")
        self.folder = folder
        self.tensors = tuple(sorted(tensors))


class UnsupportedArchitecture(WeightsError):
    """This kind of model would be computed wrongly or not at all, so it is refused."""

    def __init__(self, folder: Path, architecture: str, reason: str) -> None:
        other = untried("transformers")
        because = f"{reason}; {other}" if other else reason
        super().__init__(folder, f"models of type {architecture!r} cannot be served: {because}")
        self.architecture = architecture
        self.reason = reason


class QuantizationUnavailable(ValueError):
    """This machine lacks what computes with quantized weights."""

    def __init__(self, quantization: str, reason: str = "") -> None:
        """`reason`: why bitsandbytes cannot be used, if it is there."""
        lack = reason or "pip install 'molink[quantization]'"
        super().__init__(f"{quantization} weights need bitsandbytes: {lack}")
        self.quantization = quantization


class LoadAbandoned(RuntimeError):
    """Nobody wants the layers any more that a thread is loading: raised in it where it says how far it is."""
