"""Shares of a service's circuits among gateways: never too many, generations before spare ones, nobody starved."""

from hypothesis import given
from hypothesis import strategies as st

from molink.client.gateway.services.service import CircuitDemand, circuit_shares, granted_circuits

COUNTS = st.integers(0, 40)
DEMANDS = st.lists(st.builds(CircuitDemand, COUNTS, COUNTS, COUNTS, COUNTS), max_size=6)


@given(st.integers(1, 32), DEMANDS)
def test_shares_are_at_most_the_maximum_and_leave_nothing_that_is_wanted(
    maximum: int, demands: list[CircuitDemand]
) -> None:
    shares = circuit_shares(maximum, demands)
    wanted = [one.in_use + one.waiting + one.spare for one in demands]
    assert sum(shares) == min(maximum, sum(wanted))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))


@given(st.integers(1, 32), DEMANDS)
def test_who_lacks_a_circuit_for_a_generation_has_as_many_as_any_but_for_what_does_not_divide(
    maximum: int, demands: list[CircuitDemand]
) -> None:
    shares = circuit_shares(maximum, demands)
    for share, one in zip(shares, demands, strict=True):
        if share < one.in_use + one.waiting:
            assert share >= max(shares) - 1


@given(st.integers(1, 32), DEMANDS)
def test_spare_circuits_take_nothing_from_generations(maximum: int, demands: list[CircuitDemand]) -> None:
    modest = [CircuitDemand(one.in_use, one.waiting, one.idle) for one in demands]
    for share, least in zip(circuit_shares(maximum, demands), circuit_shares(maximum, modest), strict=True):
        assert share >= least


def test_what_others_hold_beyond_their_share_is_granted_once_they_have_given_it_back() -> None:
    first, second = CircuitDemand(in_use=4, waiting=3), CircuitDemand(waiting=5)
    assert circuit_shares(4, [first, second]) == [2, 2]
    assert [granted_circuits(4, 2, held) for held in (4, 3, 2)] == [0, 1, 2]
    assert circuit_shares(4, [CircuitDemand(idle=4, spare=4), CircuitDemand(waiting=1)]) == [3, 1]
