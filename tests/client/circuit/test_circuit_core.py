"""One generation's circuits without a swarm: whatever peers answer, leases are all or none, and it comes to an end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.circuit import circuit_core as core
from molink.client.epochs import circuit_events, patience
from molink.client.epochs.circuit_events import AVOID_S

DEADLINE_S = 130.0
PLANNED = core.Planned(("head", "tail"))
CODES = ("memory", "busy", "draining", "span", "load", "link", "request", "lost", "slow", "internal")
DRAWS = st.floats(0.5, 1.5)
REFUSED = st.builds(
    core.ReservationRefused, st.builds(core.Refusal, st.sampled_from(CODES), st.floats(0.0, 60.0)), DRAWS
)
REFUSED_OF_SEIZED = st.builds(
    core.ReservationRefused,
    st.builds(core.Refusal, st.sampled_from(CODES), st.floats(0.0, 60.0)),
    DRAWS,
    st.sampled_from(("", "head", "tail", "spare")),
    st.sampled_from(("", "head", "spare", "other", "another")),
)
ANSWERS: dict[type[core.Effect], st.SearchStrategy[core.Event]] = {
    core.Plan: st.just(PLANNED) | st.builds(core.NoRoute, DRAWS),
    core.Reserve: st.just(core.Ready()) | REFUSED | st.just(core.Overdue()),
    core.Seize: st.just(core.Ready()) | REFUSED_OF_SEIZED | st.just(core.Overdue()),
    core.AwaitNews: st.just(core.Waited()),
    core.Start: st.just(core.Yielded())
    | st.builds(
        core.Lost,
        st.floats(0.0, 20.0),
        st.floats(0.0, 30.0),
        st.booleans(),
        st.sampled_from(("", "head", "tail", "spare")),
        st.sampled_from(("", "head", "spare", "other")),
    ),
}


def begun() -> core.CircuitCore:
    circuit = core.CircuitCore()
    assert circuit.handle(core.Begin(DEADLINE_S), 100.0) == (core.Plan(doubtful=False),)
    return circuit


def running(now_s: float = 100.0) -> core.CircuitCore:
    circuit = begun()
    circuit.handle(PLANNED, now_s)
    assert circuit.handle(core.Ready(), now_s) == (core.Start(circuit.epoch),)
    return circuit


@given(st.data())
def test_whatever_peers_answer_each_epochs_leases_are_given_back_once_and_no_two_are_held(
    data: st.DataObject,
) -> None:
    circuit, now_s = core.CircuitCore(), 100.0
    effects = circuit.handle(core.Begin(DEADLINE_S), now_s)
    held: list[int] = []
    used: list[int] = []
    for _ in range(60):
        for effect in effects:
            if isinstance(effect, core.Release):
                held.remove(effect.epoch)
            elif isinstance(effect, core.Reserve):
                assert not held
                held.append(effect.epoch)
                used.append(effect.epoch)
            elif isinstance(effect, core.Seize):
                assert held == [effect.epoch - 1], (
                    "the others keep what they hold until they have the next lease"
                )
                assert effect.standby in circuit.peer_ids
                assert effect.peer_id not in circuit.peer_ids
                held[:] = [effect.epoch]
                used.append(effect.epoch)
            elif isinstance(effect, core.Start):
                assert held == [effect.epoch]
            elif isinstance(effect, core.AwaitNews):
                assert 0 < effect.wait_s < circuit.deadline_s - now_s
                now_s += effect.wait_s
        asked = core.Start(circuit.epoch) if circuit.phase is core.CircuitPhase.RUNNING else effects[-1]
        if isinstance(asked, core.GiveUp):
            break
        now_s += data.draw(st.floats(0.0, 3.0))
        effects = circuit.handle(data.draw(ANSWERS[type(asked)]), now_s)
    for effect in circuit.handle(core.End(), now_s):
        assert isinstance(effect, core.Release)
        held.remove(effect.epoch)
    assert held == []
    assert used == list(range(1, len(used) + 1))
    assert circuit.handle(core.End(), now_s) == ()


@given(st.lists(REFUSED | st.builds(core.NoRoute, DRAWS), min_size=1, max_size=8))
def test_a_swarm_that_always_says_no_is_given_up_before_the_deadline(
    answers: list[core.ReservationRefused | core.NoRoute],
) -> None:
    circuit, now_s = begun(), 100.0
    for answer in itertools.islice(itertools.cycle(answers), 400):
        if isinstance(answer, core.ReservationRefused):
            circuit.handle(PLANNED, now_s)
        *_, effect = circuit.handle(answer, now_s)
        if isinstance(effect, core.GiveUp):
            assert not effect.after_loss
            assert now_s < DEADLINE_S
            return
        if isinstance(effect, core.AwaitNews):
            now_s += effect.wait_s
            circuit.handle(core.Waited(), now_s)
    pytest.fail("it was never given up")


@given(st.lists(st.floats(0.0, 5.0), min_size=patience.MOST_FRUITLESS, max_size=patience.MOST_FRUITLESS))
def test_circuits_that_yield_nothing_are_given_up_after_so_many_and_a_token_begins_the_count_anew(
    waits_s: list[float],
) -> None:
    circuit, now_s = running(), 100.0
    circuit.handle(core.Yielded(), now_s)
    effects: tuple[core.Effect, ...] = circuit.handle(core.Lost(stood_still=True), now_s)
    assert isinstance(effects[-1], core.Plan)
    for count, wait_s in enumerate(waits_s, 1):
        circuit.handle(PLANNED, now_s)
        circuit.handle(core.Ready(), now_s)
        assert circuit.patience_s(1e-3, 1.0) == patience.first_token_s(1e-3, count)
        now_s += wait_s
        effects = circuit.handle(core.Lost(stood_still=True), now_s)
    assert effects == (core.Release(circuit.epoch), core.GiveUp(core.Problem.FRUITLESS, after_loss=True))


def test_after_a_loss_another_circuit_has_to_stand_within_the_time_from_the_last_sign_of_life() -> None:
    circuit = running()
    circuit.handle(core.Yielded(), 101.0)
    assert circuit.handle(core.Lost(unheard_s=4.0), 110.0) == (core.Release(1), core.Plan(doubtful=False))
    assert circuit.deadline_s == 110.0 + core.RECOVERY_S - 4.0
    circuit.handle(PLANNED, 110.0)
    assert circuit.handle(core.Overdue(), circuit.deadline_s) == (
        core.Release(2),
        core.GiveUp(core.Problem.NOT_READY, after_loss=True),
    )


@pytest.mark.parametrize(
    "answer",
    [
        core.Overdue(all_granted=True),
        core.ReservationRefused(core.Refusal("slow"), 1.0, "tail", all_granted=True),
    ],
    ids=["overdue", "one_not_ready"],
)
def test_while_hops_of_a_circuit_grant_a_loss_is_not_given_up_before_the_tokens_time_is_over(
    answer: core.Overdue | core.ReservationRefused,
) -> None:
    circuit, now_s = running(), 110.0
    circuit.handle(core.Yielded(), 101.0)
    circuit.handle(core.Lost(first_token_s=1.0), now_s)
    latest_s = 101.0 + patience.step_s(patience.first_token_s(1.0))
    for _ in range(200):
        circuit.handle(PLANNED, now_s)
        now_s = circuit.deadline_s
        *_, effect = circuit.handle(answer, now_s)
        if isinstance(effect, core.GiveUp):
            break
        assert isinstance(effect, core.AwaitNews)
        now_s += effect.wait_s
        circuit.handle(core.Waited(), now_s)
    assert effect == core.GiveUp(effect.problem, after_loss=True)
    assert latest_s - core.BACKOFF.longest_s <= now_s <= latest_s


def test_a_first_circuit_has_the_time_that_its_client_has_given_whoever_grants() -> None:
    circuit = begun()
    circuit.handle(PLANNED, 100.0)
    effects = circuit.handle(core.Overdue(all_granted=True), DEADLINE_S)
    assert effects == (core.Release(1), core.GiveUp(core.Problem.NOT_READY, after_loss=False))


def test_a_standby_takes_the_place_of_a_hop_once_and_a_refusal_has_another_circuit_planned() -> None:
    circuit = running()
    lost = core.Lost(unheard_s=4.0, peer_id="tail", standby="spare")
    assert circuit.handle(lost, 110.0) == (core.Seize(2, 110.0 + core.RECOVERY_S - 4.0, "tail", "spare"),)
    assert circuit.peer_ids == ("head", "spare")
    assert circuit.handle(core.Ready(), 111.0) == (core.Start(2),)
    lost = core.Lost(peer_id="spare", standby="other")
    circuit.handle(lost, 112.0)
    released, waits = circuit.handle(core.ReservationRefused(core.Refusal("memory"), 1.0), 112.5)
    assert released == core.Release(3)
    assert isinstance(waits, core.AwaitNews)
    assert circuit.handle(core.Waited(), 113.0) == (core.Plan(doubtful=False),)


@pytest.mark.parametrize("code", ["lost", "slow"])
def test_a_second_hop_that_is_gone_when_the_first_is_replaced_has_its_standby_in_its_place(code: str) -> None:
    circuit = running()
    circuit.handle(core.Lost(unheard_s=4.0, peer_id="tail", standby="spare"), 110.0)
    refused = core.ReservationRefused(core.Refusal(code), 1.0, "head", "other")
    assert circuit.handle(refused, 112.0) == (core.Seize(3, 110.0 + core.RECOVERY_S - 4.0, "head", "other"),)
    assert circuit.peer_ids == ("other", "spare")
    assert circuit.handle(core.Ready(), 112.5) == (core.Start(3),)


@pytest.mark.parametrize(("code", "standby"), [("lost", ""), ("lost", "spare"), ("memory", "other")])
def test_without_a_standby_or_where_the_hop_is_still_there_a_circuit_is_seized_once(
    code: str, standby: str
) -> None:
    circuit = running()
    circuit.handle(core.Lost(peer_id="tail", standby="spare"), 110.0)
    effects = circuit.handle(core.ReservationRefused(core.Refusal(code), 1.0, "head", standby), 112.0)
    assert effects[0] == core.Release(2)
    circuit.handle(core.Waited(), 113.0)
    circuit.handle(PLANNED, 113.0)
    effects = circuit.handle(core.ReservationRefused(core.Refusal("lost"), 1.0, "head", "other"), 113.5)
    assert effects[0] == core.Release(3), "a circuit that was planned is not seized"


@pytest.mark.parametrize(("peer_id", "standby"), [("tail", ""), ("nobody", "spare"), ("tail", "head")])
def test_without_a_standby_of_its_own_a_lost_hop_has_another_circuit_planned(
    peer_id: str, standby: str
) -> None:
    effects = running().handle(core.Lost(peer_id=peer_id, standby=standby), 110.0)
    assert effects == (core.Release(1), core.Plan(doubtful=False))


def test_the_next_token_is_waited_for_by_what_the_others_have_taken_and_not_by_who_takes_them_slowly() -> (
    None
):
    circuit = running()
    for at in range(5):
        circuit.handle(core.Yielded(), 100.0 + 12.0 * at)
        circuit.handle(core.Taken(), 110.0 + 12.0 * at)
    assert circuit.patience_s(0.0, 0.1) == patience.next_token_s(0.1, 2.0) == 2.0 * patience.MARGIN


def test_a_token_that_is_waited_for_too_long_on_all_circuits_together_is_given_up() -> None:
    circuit = running()
    late_s = 100.0 + patience.step_s(patience.first_token_s(1.0)) + 0.1
    *_, effect = circuit.handle(core.Lost(first_token_s=1.0), late_s)
    assert effect == core.GiveUp(core.Problem.FRUITLESS, after_loss=True)


@pytest.mark.parametrize("code", ["lost", "slow"])
def test_who_does_not_answer_makes_the_next_plan_doubtful_and_has_others_tried(code: str) -> None:
    circuit = begun()
    circuit.handle(PLANNED, 100.0)
    *_, wait = circuit.handle(core.ReservationRefused(core.Refusal(code), 1.0), 102.0)
    assert wait == core.AwaitNews(core.BACKOFF.first_s, scout=True)
    assert circuit.handle(core.Waited(), 102.1) == (core.Plan(doubtful=True),)


def test_a_request_is_invalid_if_hops_of_two_circuits_say_so() -> None:
    circuit, wrong = begun(), core.ReservationRefused(core.Refusal("request"), 1.0)
    circuit.handle(PLANNED, 100.0)
    assert circuit.handle(wrong, 100.0) == (core.Release(1), core.Plan(doubtful=False))
    circuit.handle(PLANNED, 100.0)
    assert circuit.handle(wrong, 100.0)[-1] == core.GiveUp(core.Problem.INVALID, after_loss=False)


def test_an_answer_that_nobody_asked_for_is_refused_and_changes_nothing() -> None:
    circuit = begun()
    for event in (core.Ready(), core.Waited(), core.Lost(), core.Yielded(), core.Begin(1.0)):
        with pytest.raises(ValueError, match="comes while a generation is planning"):
            circuit.handle(event, 100.0)
    assert circuit.handle(PLANNED, 100.0) == (core.Reserve(1, DEADLINE_S),)


def test_who_has_no_room_is_left_out_briefly_and_who_is_gone_for_long() -> None:
    assert core.Refusal("memory", 2.0).left_out_s(peers=5) == 2.0
    assert core.Refusal("busy").left_out_s(peers=5) == circuit_events.LEAST_REFUSED_S
    assert core.Refusal("memory", 2.0).left_out_s(peers=1) == 0.0
    assert core.Refusal("lost").left_out_s(peers=1) == AVOID_S
    assert core.Refusal("slow").left_out_s(peers=5) == circuit_events.SLOW_S


def test_what_a_generation_waits_for_its_turn_is_added_to_the_time_in_which_a_circuit_has_to_stand() -> None:
    circuit = core.CircuitCore()
    circuit.handle(core.Begin(10.0), 0.0)
    circuit.handle(core.NoRoute(1.0), 0.0)
    circuit.handle(core.Waited(queued_s=100.0), 100.0)
    assert circuit.deadline_s == 110.0
    (effect,) = circuit.handle(core.NoRoute(1.0), 109.0)
    assert isinstance(effect, core.AwaitNews)
