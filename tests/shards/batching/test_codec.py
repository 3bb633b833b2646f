"""Activations survive the way through bytes, and bytes that do not fit are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.codec import decode, dtype_of, encode
from molink.shards.spec import DTYPE_BYTES

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))
BUFFERS = st.sampled_from([bytes, bytearray, memoryview, lambda view: memoryview(bytearray(b"x" + view))[1:]])


@given(
    dtype=DTYPES, rows=st.integers(0, 5), hidden=st.integers(1, 40), seed=st.integers(0, 9), as_buffer=BUFFERS
)
def test_every_tensor_comes_back_bit_for_bit(
    dtype: str, rows: int, hidden: int, seed: int, as_buffer: type
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, hidden, generator=generator).to(dtype_of(dtype))
    encoded = encode(tensor)
    assert encoded.nbytes == rows * hidden * DTYPE_BYTES[dtype]
    assert encoded.format == "B"
    decoded = decode(as_buffer(encoded), rows, hidden, dtype)
    assert decoded.dtype == tensor.dtype
    assert torch.equal(decoded, tensor)


@given(dtype=DTYPES, rows=st.integers(0, 2**40), hidden=st.integers(1, 2**40), size=st.integers(0, 64))
def test_bytes_of_another_length_are_refused_before_anything_is_allocated(
    dtype: str, rows: int, hidden: int, size: int
) -> None:
    expected = rows * hidden * DTYPE_BYTES[dtype]
    if expected == size:
        assert decode(bytes(size), rows, hidden, dtype).shape == (rows, hidden)
    else:
        with pytest.raises(ValueError, match=f"are {expected} bytes, but {size} came"):
            decode(bytes(size), rows, hidden, dtype)


def test_infinities_and_nan_survive() -> None:
    tensor = torch.tensor([[float("inf"), float("-inf"), float("nan"), -0.0]])
    decoded = decode(bytes(encode(tensor)), 1, 4, "float32")
    assert torch.equal(decoded.view(torch.int32), tensor.view(torch.int32))


def test_tensors_made_in_inference_mode_and_views_are_encoded_as_they_look() -> None:
    with torch.inference_mode():
        tensor = torch.arange(24.0).view(4, 6)
        turned = tensor.t()
    assert torch.equal(decode(bytes(encode(turned)), 6, 4, "float32"), turned)
    assert torch.equal(decode(bytes(encode(tensor[1:3])), 2, 6, torch.float32), tensor[1:3])


def test_a_contiguous_tensor_and_a_writable_buffer_are_not_copied() -> None:
    tensor = torch.zeros(2, 3)
    encoded = encode(tensor)
    tensor[0, 0] = 1.0
    assert bytes(encoded[:4]) == b"\x00\x00\x80\x3f"
    buffer = bytearray(encoded)
    decoded = decode(buffer, 2, 3, "float32")
    buffer[:4] = b"\x00\x00\x00\x40"
    assert float(decoded[0, 0]) == 2.0


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3), torch.zeros(1, 2, 3), torch.zeros(2, 2, dtype=torch.int64)]
)
def test_what_is_no_activation_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="activations are"):
        encode(tensor)


def test_negative_shapes_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="rows >= 0"):
        decode(b"", -1, 4, "float32")
    with pytest.raises(ValueError, match="hidden_size >= 1"):
        decode(b"", 1, 0, "float32")
    with pytest.raises(ValueError, match="int8"):
        dtype_of("int8")
