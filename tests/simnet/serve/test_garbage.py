"""While a world runs Python looks for garbage seldom, and afterwards as before."""

import gc

import pytest

from molink.simnet.serve.simulated import seldom_collected


def fail(usual: int) -> None:
    with seldom_collected():
        assert gc.isenabled()
        assert gc.get_threshold()[0] > usual
        assert gc.get_freeze_count() > 0
        raise RuntimeError("a world")


@pytest.mark.usefixtures("freezing")
def test_afterwards_garbage_is_looked_for_as_before_even_if_the_world_failed() -> None:
    gc.unfreeze()
    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(RuntimeError, match="a world"):
        fail(before[0][0])
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
