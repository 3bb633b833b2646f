"""Simulated circuits guess by the product's own objects, and what they generate is what was recorded."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import quantiles

import pytest

from molink.peer.scheduling.trip_load import ALONE
from molink.routing.cost.pipeline import PipelineStage
from molink.simnet.core import serving_world
from molink.simnet.core.generations import GenerationTape, recorded_generations
from molink.simnet.core.guessing import SimulatedSpeculation, TapeGuesser
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import QWEN2_7B, even_spans
from molink.simnet.serve.scenario import Scenario, SimulatedStage
from molink.simnet.serve.served_as import ServedAs
from molink.simnet.serve.simulated import RequestLoad, SimulatedRun, simulate_serving


def run(
    speculation: str, delay_ms: float, rate_rps: float = 0.2, temperature: float = 0.0, tokens: int = 60
) -> SimulatedRun:
    """Requests of 200 and so many tokens, one every so often, on three machines."""
    stages = tuple(SimulatedStage(DEVICES["rtx-4090"], span) for span in even_spans(QWEN2_7B.layers, 3))
    scenario = Scenario(QWEN2_7B, stages, 100.0, delay_ms, 2.5)
    load = RequestLoad(tuple(TraceRequest(at, 200, tokens) for at in range(20)), rate_rps, 0.0, 30.0)
    return simulate_serving(scenario, "molink", ServedAs("molink", None, speculation, temperature), load)


def tpot_s(served: SimulatedRun) -> float:
    spans = [one.token_s[-1] - one.token_s[0] for one in served.outcomes]
    return sum(spans) / sum(len(one.token_s) - 1 for one in served.outcomes)


@pytest.mark.full
def test_every_request_gets_all_its_tokens_sooner_the_longer_the_way_is() -> None:
    gains = []
    for delay_ms in (1.0, 60.0):
        off, auto = run("off", delay_ms), run("auto", delay_ms)
        assert [len(one.token_s) for one in auto.outcomes] == [len(one.token_s) for one in off.outcomes]
        assert all(one.error is None for one in auto.outcomes)
        gains.append(tpot_s(off) / tpot_s(auto))
    assert 1 < gains[0] < gains[1]


@pytest.mark.full
@pytest.mark.parametrize("delay_ms", [1.0, 30.0, 100.0])
@pytest.mark.parametrize("rate_rps", [0.1, 2.0])
def test_a_decision_per_trip_is_within_5_percent_of_the_best_fixed_number(
    delay_ms: float, rate_rps: float
) -> None:
    fixed = {number: tpot_s(run(number, delay_ms, rate_rps)) for number in ("off", "1", "2", "4", "8")}
    assert tpot_s(run("auto", delay_ms, rate_rps)) <= 1.05 * min(fixed.values()), fixed


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_session_without_guesses_is_hardly_kept_waiting_by_those_with(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """One in three has none; the slowest of a hundred trips is compared with that where nobody has any."""

    def of_two_in_three(
        speculation: SimulatedSpeculation, number: int, stages: Sequence[PipelineStage]
    ) -> TapeGuesser | None:
        return TapeGuesser(speculation, number, stages) if number % 3 else None

    monkeypatch.setattr(serving_world, "TapeGuesser", of_two_in_three)
    slowest_s = []
    for speculation in ("off", "auto"):
        served = run(speculation, 30.0, 1.0, temperature, tokens=100)
        without = [one.token_s for one in served.outcomes[::3]]
        gaps_s = [two - one for came_s in without for one, two in pairwise(came_s)]
        assert len(gaps_s) > 900
        slowest_s.append(quantiles(gaps_s, n=100)[-1])
    assert slowest_s[1] <= 1.15 * slowest_s[0]


def test_a_tape_goes_on_without_end_and_begins_elsewhere_for_each_session() -> None:
    first, second = GenerationTape(0), GenerationTape(1)
    one = next(one for one in recorded_generations() if one.temperature == 0)
    assert first.prompt == one.prompt
    assert first.tokens(0, len(one.generated)) == one.generated
    assert second.prompt != first.prompt
    assert len(first.tokens(100_000, 10)) == 10
    with pytest.raises(ValueError, match="nothing was recorded at temperature 3"):
        GenerationTape(0, 3.0)


@pytest.mark.parametrize(
    "speculation", [SimulatedSpeculation(), SimulatedSpeculation(4), SimulatedSpeculation(2, 0.8)]
)
def test_a_guesser_says_how_many_of_its_guesses_are_of_the_tape(speculation: SimulatedSpeculation) -> None:
    guesser, tape = TapeGuesser(speculation, 3, ()), GenerationTape(3, speculation.temperature)
    generated = right = 0
    while generated < 200:
        _, trip = guesser.propose(None, 6, ALONE)
        assert 0 <= guesser.right <= trip.guesses <= min(6, speculation.fixed or 6)
        guesser.record_trip([None] * (guesser.right + 1), trip.guesses)
        generated, right = generated + guesser.right + 1, right + guesser.right
    assert right > 0
    assert tape.token(0) == tape.tokens(0, 1)[0]


def test_with_a_draft_model_more_is_right() -> None:
    trips = {}
    for name in ("auto", "draft"):
        speculation = SimulatedSpeculation.named(name)
        assert speculation is not None
        guesser, generated, trips[name] = TapeGuesser(speculation, 0, ()), 0, 0
        while generated < 60:
            _, trip = guesser.propose(None, 6, ALONE)
            guesser.record_trip([None] * (guesser.right + 1), trip.guesses)
            generated, trips[name] = generated + guesser.right + 1, trips[name] + 1
    assert trips["draft"] < 0.8 * trips["auto"]


def test_a_number_of_guesses_that_cannot_be_is_named() -> None:
    assert SimulatedSpeculation.named("off") is SimulatedSpeculation.named("0") is None
    for wrong in ("16", "-1", "many", "²"):
        with pytest.raises(ValueError, match="none of auto, draft, off and the numbers from 0 to 15"):
            SimulatedSpeculation.named(wrong)
