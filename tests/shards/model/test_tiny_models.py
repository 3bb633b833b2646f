"""What the tests' tiny models are made of."""

import pytest
from support.models.tiny_models import quietly
from support.models.varied_weights import monotonous


@pytest.mark.full
def test_the_weights_that_are_written_down_give_varied_text() -> None:
    """A lost cache or a swapped layer would go unnoticed in a text of one token."""
    assert quietly(monotonous) == []
