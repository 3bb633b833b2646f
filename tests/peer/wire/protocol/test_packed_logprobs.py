"""Log-probabilities of prompts on the wire: read as they were written, and nothing else is read."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numbers

from molink.peer.wire.protocol.prompt_logprobs import PromptLogprobs, unpacked

SHAPES = st.tuples(st.integers(0, 9), st.integers(0, 5))
FLOATS = st.floats(-1e4, 0, width=32)


@given(st.data(), SHAPES)
def test_what_was_packed_is_read(data: st.DataObject, shape: tuple[int, int]) -> None:
    told = PromptLogprobs(
        data.draw(numbers.arrays(np.float32, shape[0], elements=FLOATS)),
        data.draw(numbers.arrays(np.uint32, shape)),
        data.draw(numbers.arrays(np.float32, shape, elements=FLOATS)),
    )
    content = told.packed()
    assert len(content) == shape[0] * (4 + 8 * shape[1])
    for likeliest in (shape[1], None) if shape[0] else (shape[1],):
        read = unpacked(content, shape[0] + 1, likeliest)
        assert np.array_equal(read.logprobs, told.logprobs)
        assert np.array_equal(read.likeliest_ids, told.likeliest_ids)
        assert np.array_equal(read.likeliest, told.likeliest)


@given(st.binary(max_size=200), st.integers(1, 12), st.integers(0, 4))
def test_content_of_another_length_is_refused(content: bytes, tokens: int, likeliest: int) -> None:
    if len(content) == (tokens - 1) * (4 + 8 * likeliest):
        assert len(unpacked(content, tokens, likeliest).logprobs) == tokens - 1
    else:
        with pytest.raises(ValueError, match="no log-probabilities"):
            unpacked(content, tokens, likeliest)
