"""Lossy encodings of activations: how far off they may be, how long they are, and what is refused."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from molink.shards.codec import (
    BLOCK,
    LEAST_SCALE,
    decode,
    decode_apart,
    dtype_of,
    encode,
    encoded_bytes,
    rows_apart,
)
from molink.shards.spec import ACTIVATION_CODECS, DTYPE_BYTES, row_bytes

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
LOSSY = [name for name in ACTIVATION_CODECS if name != "none"]
ROUNDING = 2.0**-16
"""Of float32 arithmetic on up to 127 steps, in steps."""
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any finite activations, blocks of zeros and of vastly different values among them."""
    rows, hidden = draw(st.integers(1, 4)), draw(st.integers(1, 3 * BLOCK))
    few = draw(st.lists(numbers, min_size=1, max_size=12))
    picks = torch.randint(
        len(few), (rows, hidden), generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))
    )
    dtype = dtype_of(draw(DTYPES))
    most = torch.finfo(dtype).max
    return torch.tensor(few, dtype=torch.float64)[picks].clamp(-most, most).to(dtype).clamp(-most, most)


def scales_of(encoded: memoryview, tensor: torch.Tensor) -> torch.Tensor:
    """The scale of every value, as the documented layout has them: first, one for each block of a row."""
    rows, hidden = tensor.shape
    blocks = math.ceil(hidden / BLOCK)
    scales = torch.frombuffer(bytearray(encoded[: 4 * rows * blocks]), dtype=torch.float32)
    return scales.view(rows, blocks).repeat_interleave(BLOCK, dim=1)[:, :hidden].double()


@given(tensors())
@example(torch.zeros(2, 70))
@example(torch.full((1, 3), torch.finfo(torch.float32).max))
@example(torch.full((1, 3), torch.finfo(torch.float16).max, dtype=torch.float16))
@example(torch.full((1, 3), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16))
@example(torch.full((1, 65), 1e-45))
def test_int8_is_off_by_half_a_scale_at_most(tensor: torch.Tensor) -> None:
    rows, hidden = tensor.shape
    encoded = encode(tensor, "int8")
    scales = scales_of(encoded, tensor)
    decoded = decode(bytes(encoded), rows, hidden, tensor.dtype, "int8")
    exact = decode(bytes(encoded), rows, hidden, "float32", "int8").double()
    assert decoded.dtype == tensor.dtype
    assert bool(((exact - tensor.double()).abs() <= scales * (0.5 + ROUNDING)).all())
    assert bool((decoded.double() - exact).abs().le(exact.abs() * torch.finfo(tensor.dtype).eps + 1e-7).all())
    largest = tensor.double().abs().amax()
    assert float(scales.max()) <= max(float(largest) / 127 * (1 + ROUNDING), LEAST_SCALE)


@given(tensors())
def test_zeros_stay_zeros_and_signs_stay_signs(tensor: torch.Tensor) -> None:
    decoded = decode(bytes(encode(tensor, "int8")), *tensor.shape, tensor.dtype, "int8")
    assert bool((decoded.double() * tensor.double() >= 0).all())


@pytest.mark.parametrize("encoding", LOSSY)
@given(dtype=DTYPES, rows=st.integers(0, 5), hidden=st.integers(1, 200), seed=st.integers(0, 9))
def test_lengths_are_exact_and_values_near(
    encoding: str, dtype: str, rows: int, hidden: int, seed: int
) -> None:
    tensor = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype_of(dtype))
    encoded = encode(tensor, encoding)
    assert encoded.nbytes == encoded_bytes(encoding, rows, hidden)
    assert encoded.format == "B"
    decoded = decode(bytes(encoded), rows, hidden, dtype, encoding)
    assert decoded.dtype == tensor.dtype
    assert decoded.shape == tensor.shape
    assert torch.allclose(decoded.float(), tensor.float(), rtol=2**-7, atol=0.03)


@pytest.mark.parametrize("encoding", ["float16", "bfloat16"])
def test_a_cast_is_the_nearest_number_and_never_infinite(encoding: str) -> None:
    tensor = torch.tensor([[1.0, -2.5, 3.1415927, 1e6, -3e38]])
    decoded = decode(bytes(encode(tensor, encoding)), 1, 5, "float32", encoding)
    assert torch.equal(decoded[:, :3], tensor[:, :3].to(dtype_of(encoding)).float())
    assert bool(torch.isfinite(decoded).all())


def test_what_is_not_finite_becomes_zero_or_the_largest_number_and_spoils_its_own_block_only() -> None:
    for dtype in DTYPE_BYTES:
        tensor = torch.ones(2, 2 * BLOCK, dtype=dtype_of(dtype))
        tensor[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        decoded = decode(bytes(encode(tensor, "int8")), 2, 2 * BLOCK, dtype, "int8")
        most = torch.finfo(tensor.dtype).max
        assert bool(torch.isfinite(decoded).all())
        assert decoded[0, :2].tolist() == pytest.approx([most, -most], rel=2**-7)
        assert float(decoded[0, 2]) == 0.0
        assert torch.allclose(decoded[1].float(), tensor[1].float(), rtol=2**-7)
        assert torch.allclose(decoded[0, BLOCK:].float(), tensor[0, BLOCK:].float(), rtol=2**-7)


@given(dtype=DTYPES, rows=st.integers(0, 3), hidden=st.integers(1, 80), data=st.data())
def test_any_bytes_of_the_right_length_are_finite_numbers_or_refused(
    dtype: str, rows: int, hidden: int, data: st.DataObject
) -> None:
    size = encoded_bytes("int8", rows, hidden)
    fill = data.draw(st.binary(min_size=1, max_size=64))
    content = (fill * (size // len(fill) + 1))[:size]
    try:
        decoded = decode(content, rows, hidden, dtype, "int8")
    except ValueError as error:
        assert "out of range" in str(error)  # noqa: PT017
    else:
        assert bool(torch.isfinite(decoded).all())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 3e38])
def test_a_scale_that_no_encoder_writes_is_refused(scale: float) -> None:
    encoded = bytearray(encode(torch.ones(2, 70), "int8"))
    encoded[4:8] = torch.tensor([scale]).numpy().tobytes()
    with pytest.raises(ValueError, match="out of range"):
        decode(encoded, 2, 70, "float32", "int8")


@pytest.mark.parametrize("encoding", LOSSY)
@given(rows=st.integers(0, 2**40), hidden=st.integers(1, 2**40), size=st.integers(0, 64))
def test_bytes_of_another_length_are_refused_before_anything_is_allocated(
    encoding: str, rows: int, hidden: int, size: int
) -> None:
    expected = encoded_bytes(encoding, rows, hidden)
    if size != expected:
        with pytest.raises(ValueError, match=f"are {expected} bytes, but {size} came"):
            decode(bytes(size), rows, hidden, "float32", encoding)


def test_an_unaligned_buffer_and_views_are_read_as_they_look() -> None:
    tensor = torch.arange(140.0).view(70, 2).t()
    encoded = encode(tensor, "int8")
    unaligned = memoryview(bytearray(b"x" + encoded))[1:]
    assert torch.equal(
        decode(unaligned, 2, 70, "float32", "int8"), decode(bytes(encoded), 2, 70, "float32", "int8")
    )


def test_int8_takes_less_than_three_tenths_of_float32() -> None:
    assert encoded_bytes("int8", 1, 4096) / encoded_bytes("float32", 1, 4096) == 0.265625


def test_unknown_encodings_are_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        encode(torch.zeros(1, 2), "int4")
    with pytest.raises(ValueError, match="none"):
        decode(bytes(8), 1, 2, "float32", "none")


@given(tensors(), st.sampled_from(("int8", "float32", "bfloat16")), st.data())
def test_rows_that_are_taken_apart_are_those_that_came(
    tensor: torch.Tensor, encoding: str, data: st.DataObject
) -> None:
    rows, hidden = tensor.shape
    payload = encode(tensor.float(), encoding)
    whole = decode(payload, rows, hidden, torch.float32, encoding)
    apart, size = rows_apart(payload, rows, hidden, encoding), row_bytes(encoding, hidden)
    assert apart.nbytes == rows * size
    first = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(first + 1, rows))
    some = bytes(apart[first * size : stop * size])
    assert torch.equal(decode_apart(some, stop - first, hidden, torch.float32, encoding), whole[first:stop])
    with pytest.raises(ValueError, match="bytes"):
        decode_apart(some[:-1], stop - first, hidden, torch.float32, encoding)
