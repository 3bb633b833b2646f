"""Peers are killed, stopped, cut off, and restarted in the middle of generations, and every one of these ends with the
tokens of an undisturbed run."""

import pytest
from support.chaos.chaos import ENDING, KINDS, Chaos, Served
from support.swarms.live_swarms import References, bundled_folder

from molink.client.circuit.session_request import SessionRequest
from molink.shards.spec import SamplingParams
from molink.simnet.emulate.serving import spec_of

pytestmark = pytest.mark.anyio

SPEC = spec_of("real", None, "", 1)
SCENE = "KING RICHARD III:\nNow is the winter of our discontent made glorious summer by this sun of York;\n"
NEW_TOKENS = 64


def requests(references: References, count: int) -> list[SessionRequest]:
    """Greedy and sampled ones; of each two one begins as others do."""
    asked = []
    for number in range(count):
        text = (SCENE if number % 2 else "") + f"CITIZEN {number}:\n"
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        if number % 4 > 1:
            params = SamplingParams(
                max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.8, top_p=0.9, seed=number
            )
        asked.append(SessionRequest(references.ids(bundled_folder(), text), params))
    return asked


async def check(
    chaos: Chaos, asked: list[SessionRequest], references: References, *, together: int, for_s: float
) -> Served:
    """No generation may fail: of each span one holder is struck at a time, and the other lives."""
    served = await chaos.serve_and_strike(asked, together=together, for_s=for_s)
    for number, request in enumerate(asked):
        if not request.params.temperature:
            prompt = tuple(request.prompt)
            assert served.tokens[number] == references.greedy(bundled_folder(), prompt, NEW_TOKENS)
    print(f"{served.generations} generations on {served.circuits} circuits, faults: {dict(served.faults)}")
    waits_s = sorted(served.recoveries_s)
    print(
        f"gone on without their victims: {dict(served.noticed)}; recoveries: {len(waits_s)}, longest {waits_s[-3:]}"
    )
    assert not served.wrong, "\n".join(served.wrong)
    assert served.circuits > served.generations
    return served


@pytest.mark.real
@pytest.mark.full
async def test_every_generation_ends_with_its_tokens_whatever_befalls_peers(references: References) -> None:
    """A kill, a stop, and a line that falls silent."""
    async with Chaos(SPEC, ((0, 6), (6, 12)), seed=9) as chaos:
        await check(chaos, requests(references, 4), references, together=2, for_s=6.0)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
async def test_ten_minutes_of_faults_cost_no_token(references: References) -> None:
    async with Chaos(SPEC, ((0, 3), (3, 6), (6, 9), (9, 12)), seed=20) as chaos:
        served = await check(chaos, requests(references, 40), references, together=4, for_s=600.0)
    assert served.faults.keys() == KINDS
    assert (+served.noticed).keys() >= ENDING
