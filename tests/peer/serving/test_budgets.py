"""What strangers may ask in a time: each as much as its rate says, and never all that there is."""

import pytest

from molink.peer.serving.budgets import MOST_BUCKETS, Budget, RequestRate, RequestRates

RATES = RequestRates(
    identity=RequestRate(2.0, 4.0), network=RequestRate(4.0, 8.0), everybody=RequestRate(8.0, 20.0)
)


def spent(budget: Budget, identity: str, network: str, now: float, *, known: bool = False) -> int:
    """How often one may ask at this moment."""
    return next(count for count in range(1000) if budget.spend(identity, network, now, known=known))


def test_an_identity_may_ask_so_often_at_once_and_then_so_often_a_second() -> None:
    budget = Budget(RATES)
    assert spent(budget, "a", "", 0.0) == 4
    assert budget.spend("a", "", 0.0) == pytest.approx(0.5)
    assert spent(budget, "a", "", 1.0) == 2
    assert spent(budget, "a", "", 1000.0) == 4
    assert spent(budget, "a", "", 0.0) == 0


def test_identities_of_one_network_share_its_budget() -> None:
    budget = Budget(RATES)
    assert [spent(budget, name, "203.0.113.0/24", 0.0) for name in "abcd"] == [4, 4, 0, 0]
    assert spent(budget, "e", "198.51.100.0/24", 0.0) == 4


def test_strangers_never_take_the_last_tenth() -> None:
    budget = Budget(RATES)
    assert sum(spent(budget, f"stranger {number}", "", 0.0) for number in range(100)) == 18
    assert spent(budget, "known", "", 0.0, known=True) == 2


def test_what_is_refused_costs_nothing() -> None:
    budget = Budget(RATES)
    spent(budget, "a", "", 0.0)
    for _ in range(100):
        assert budget.spend("a", "", 0.0) > 0
    assert spent(budget, "a", "", 0.5) == 1


def test_more_than_there_ever_is_may_be_taken_once_all_is_there() -> None:
    budget = Budget(RATES)
    assert budget.spend("a", "", 0.0, amount=5.0) == 0.0
    assert budget.spend("a", "", 0.0) == pytest.approx(1.0)


def test_identities_without_end_take_no_memory_without_end() -> None:
    budget = Budget(RATES)
    for number in range(2 * MOST_BUCKETS):
        budget.spend(str(number), str(number), float(number))
    assert budget.known == (MOST_BUCKETS, MOST_BUCKETS)
