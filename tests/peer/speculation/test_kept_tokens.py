"""Tokens that are kept to guess from: nobody who keeps no more than an equal share is refused, or loses any."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.speculation.kept_tokens import KeptPlace, KeptTokens, place_kept

MOST = 100
sessions = st.builds(KeptTokens, st.sampled_from("abcd"), st.integers(0, 40), st.integers(0, 60))


def held(kept: list[KeptTokens]) -> Counter[str]:
    """By client."""
    found = Counter[str]()
    for one in kept:
        found[one.client] += one.text + one.predicted
    return found


@given(st.lists(sessions, max_size=12))
def test_who_keeps_no_more_than_an_equal_share_is_taken_and_loses_nothing(asked: list[KeptTokens]) -> None:
    kept: list[KeptTokens] = []
    for one in asked:
        place = place_kept(kept, one, MOST)
        before = held([*kept, one])
        share = MOST / len(before)
        if place is None:
            texts = sum(each.text for each in (*kept, one) if each.client == one.client)
            assert texts > share
            continue
        for was, left in zip(kept, place.left, strict=True):
            assert left in (was, KeptTokens(was.client, was.text), KeptTokens(was.client, 0))
            assert left == was or before[was.client] > share
            assert left.text == was.text or not any(
                each.predicted for each in place.left if each.client == was.client
            )
        if one.predicted and before[one.client] <= share:
            assert place.keeps_prediction
        kept = [*place.left, one if place.keeps_prediction else KeptTokens(one.client, one.text)]
        assert held(kept).total() <= MOST


def test_a_client_alone_has_all_of_it_and_its_predictions_make_room_for_its_texts() -> None:
    kept = [KeptTokens("one", 10, 50), KeptTokens("one", 10, 20)]
    assert place_kept(kept, KeptTokens("one", 5, 20), MOST) == KeptPlace(False, tuple(kept))
    left = (KeptTokens("one", 10), KeptTokens("one", 10, 20))
    assert place_kept(kept, KeptTokens("one", 15, 0), MOST) == KeptPlace(False, left)
    assert place_kept(kept, KeptTokens("one", 81), MOST) is None


@pytest.mark.parametrize("prediction", [0, 30])
def test_who_keeps_most_makes_room_for_another(prediction: int) -> None:
    kept = [KeptTokens("stranger", 5, 40), KeptTokens("stranger", 5, 30), KeptTokens("honest", 20)]
    left = (KeptTokens("stranger", 5), *kept[1:])
    assert place_kept(kept, KeptTokens("honest", 10, prediction), MOST) == KeptPlace(prediction > 0, left)
    texts = [KeptTokens("stranger", 50), KeptTokens("stranger", 45)]
    assert place_kept(texts, KeptTokens("honest", 10), MOST) == KeptPlace(
        False, (KeptTokens("stranger", 0), texts[1])
    )
