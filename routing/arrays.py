"""Turning what callers pass into checked, read-only arrays. Every error names the field and what to pass
instead."""

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MOST = 2**61
"""Any sum of two numbers up to this fits in 64 bits."""


def float_array(name: str, values: object, *shapes: tuple[int, ...]) -> FloatArray:
    """Finite, non-negative float64 of one of the shapes; a private read-only copy."""
    array = _numbers(name, values, *shapes)
    result = np.array(array, dtype=np.float64)
    result.setflags(write=False)
    return result


def needed_bytes(name: str, values: object, shape: tuple[int, ...]) -> IntArray:
    """Finite, non-negative int64 whose sum stays below 2**61; fractions are rounded up. A private read-only
    copy."""
    array = _numbers(name, values, shape)
    if float(array.sum(dtype=np.float64)) >= _MOST:
        raise ValueError(f"{name} must add up to less than 2**61 bytes")
    return _frozen_int(np.ceil(array) if array.dtype.kind == "f" else array)


def available_bytes(name: str, values: object, shape: tuple[int, ...]) -> IntArray:
    """Finite, non-negative int64, at most 2**61; fractions are rounded down. A private read-only copy."""
    array = _numbers(name, values, shape)
    return _frozen_int(np.minimum(np.floor(array) if array.dtype.kind == "f" else array, _MOST))


def bool_array(name: str, values: object, shape: tuple[int, ...]) -> BoolArray:
    """Booleans of the shape; a private read-only copy."""
    array = _array(name, values, shape)
    if array.dtype.kind != "b":
        raise ValueError(f"{name} must hold booleans, got {array.dtype}")
    result = np.array(array, dtype=np.bool_)
    result.setflags(write=False)
    return result


def whole_number(name: str, value: object) -> int:
    """A non-negative integer below 2**61."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value < _MOST:
        raise ValueError(f"{name} must be between 0 and 2**61, got {value}")
    return int(value)


def _array(name: str, values: object, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{name} is not an array of numbers: {error}") from error
    if array.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} must have the shape {wanted}, got {array.shape}")
    return array


def _numbers(name: str, values: object, *shapes: tuple[int, ...]) -> npt.NDArray[Any]:
    array = _array(name, values, *shapes)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold numbers of at most 64 bits, got {array.dtype}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    if (array < 0).any():
        raise ValueError(f"{name} must not be negative, got {array.min()}")
    return array


def _frozen_int(array: npt.NDArray[Any]) -> IntArray:
    result = np.array(array, dtype=np.int64)
    result.setflags(write=False)
    return result
