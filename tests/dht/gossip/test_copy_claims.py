"""A table that is copied from several peers at once comes whole, each part from one of them."""

from hypothesis import given
from hypothesis import strategies as st

from molink.dht.gossip.copy_claims import CopyClaims
from molink.dht.gossip.table import MAX_TAGS

PATIENCE_S = 3.0


@given(st.integers(0, 5_000))
def test_no_record_is_asked_of_two_and_none_is_left_out(count: int) -> None:
    claims, missing, asked = CopyClaims(PATIENCE_S), set(range(count)), list[int]()
    while part := claims.take(sorted(missing), count, 0.0):
        assert len(part) <= MAX_TAGS
        assert missing.issuperset(part)
        missing -= set(part)
        asked += part
    assert sorted(asked) == list(range(count))


def test_what_one_is_slow_to_give_is_asked_of_another_after_a_while() -> None:
    claims, tags = CopyClaims(PATIENCE_S), tuple(range(10))
    assert claims.take(tags, 10, 0.0) == tags
    assert claims.take(tags, 10, PATIENCE_S - 0.1) == ()
    assert claims.free_at(tags) == PATIENCE_S
    assert claims.take(tags, 10, PATIENCE_S) == tags


def test_what_was_not_given_may_be_asked_of_another_at_once() -> None:
    claims = CopyClaims(PATIENCE_S)
    claims.release(claims.take((1, 2), 2, 0.0))
    assert claims.take((2, 3), 2, 0.0) == (2, 3)
