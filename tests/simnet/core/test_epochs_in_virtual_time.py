"""Simulated peers drive the product's core over a change of epoch: what hops hold is not computed again."""

from collections.abc import Sequence
from functools import partial

import pytest

from molink.peer.hop import events
from molink.peer.hop.session import DrawnToken
from molink.peer.memory.leases import LeaseKey
from molink.simnet.core.request_load import Request, RequestOutcome
from molink.simnet.core.serving_world import ServingWorld
from molink.simnet.core.simulated_sender import SimulatedSession
from molink.simnet.core.timeline import Timeline
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import QWEN2_7B, even_spans
from molink.simnet.serve.scenario import Scenario, SimulatedStage, circuit_plan
from molink.simnet.serve.served_as import usual

CHANGES_AFTER = 10
REQUESTS = [Request(number, 0.5 * number, 4000, 40) for number in range(4)]


class EpochWorld(ServingWorld):
    """Sessions go on in another epoch after some tokens, on the same hops."""

    holds: bool | None = True
    """Whether hops have kept what they held; None: no epoch changes."""

    def _deliver(self, tokens: Sequence[DrawnToken[SimulatedSession, None]]) -> None:
        super()._deliver(tokens)
        for session, _, position, *_ in tokens:
            seen = position - session.request.prompt_tokens
            if self.holds is not None and (session.key.epoch, seen) == (1, CHANGES_AFTER):
                self.timeline.call(0.0, partial(self._change, session, position + 1))

    def _change(self, head: SimulatedSession, history_tokens: int) -> None:
        older, position = [head], history_tokens - 1 if self.holds else 0
        while older[-1].after is not head:
            older.append(older[-1].after)
        key = LeaseKey(head.key.session, 2)
        hops = [SimulatedSession(key, old.place, old.request) for old in older]
        for hop, (peer, old, session) in enumerate(zip(self.peers, older, hops, strict=True)):
            session.before, session.after = hops[hop - 1], hops[(hop + 1) % len(hops)]
            peer.handle(events.SessionEnded(old))
            peer.handle(events.SessionOpened(session))
            peer.handle(events.SessionReady(session, position, 0))
        tokens = history_tokens - position
        self.peers[0].handle(events.PromptStarted(hops[0], tokens, position, lambda *_: None))


def serve(peers: int, *, holds: bool | None) -> tuple[list[RequestOutcome], float]:
    """What became of the requests, and how long engines computed."""
    stages = tuple(SimulatedStage(DEVICES["rtx-4090"], span) for span in even_spans(QWEN2_7B.layers, peers))
    scenario = Scenario(QWEN2_7B, stages, 100.0, 30.0, software_ms=0.0)
    timeline = Timeline()
    world = EpochWorld(circuit_plan(scenario, "molink", usual("molink", peers)), timeline)
    world.holds = holds
    world.desk.arrive(REQUESTS)
    timeline.run()
    world.check()
    return [world.desk.outcome(one.number) for one in REQUESTS], sum(peer.busy_s for peer in world.peers)


@pytest.mark.parametrize("peers", [1, 3])
def test_every_token_comes_once_and_what_hops_hold_is_not_computed_again(peers: int) -> None:
    undisturbed, busy_s = serve(peers, holds=None)
    kept, kept_busy_s = serve(peers, holds=True)
    anew, anew_busy_s = serve(peers, holds=False)
    for outcomes in (undisturbed, kept, anew):
        assert [len(one.token_s) for one in outcomes] == [40] * len(REQUESTS)
        assert not any(one.error for one in outcomes)
    assert anew_busy_s > 1.3 * kept_busy_s
    assert kept_busy_s < 1.3 * busy_s
