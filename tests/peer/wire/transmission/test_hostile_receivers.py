"""What one receiver says changes its own link: the uplink that all share stays what honest links have shown."""

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.links.hostile_line import PROMPT_BYTES, RATE, BesetUplink, Lie
from support.links.virtual_line import quantile
from support.pairwise import usually
from support.properties import examples

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.shared_rate import HOLDS_S, OUTWEIGHED, LinkEvidence, UplinkRate
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.fair_parts import COMPLAINT_S, HEEDED_S, FairShareGuard, LinkShare
from molink.peer.wire.transmission.state import STALLED_S
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import Outgoing, Send

DECODE, PREFILL = TrafficClass.DECODE, TrafficClass.PREFILL
MIB = 1024 * 1024
PROMPTS_S = [3.0, 5.0, 7.0, 9.0]
LEAST_PART, MOST_PARTS = 0.5, 2.0
"""Of the true rate: what the uplink may be taken to carry while honest links use it."""
LIES = {
    "acknowledges one chunk every 50 ms": Lie(every_s=0.05, chunks=1),
    "acknowledges one chunk every 500 ms": Lie(every_s=0.5, chunks=1),
    "holds every acknowledgement back for a second": Lie(held_s=1.0),
    "stops acknowledging": Lie(never_after_s=1.2),
    "acknowledges nothing": Lie(never_after_s=0.0),
    "acknowledges in bursts": Lie(every_s=1.0),
    "stamps ten times as fast as a clock": Lie(pace=10.0),
    "stamps drift": Lie(pace=1.01),
    "stamps jump by minutes": Lie(jump_s=100.0),
    "says that the way is full": Lie(congested_s=0.5),
}
GREEDY = {
    "acknowledges what has not arrived": Lie(early=True),
    "acknowledges what has not arrived, in bursts": Lie(early=True, every_s=0.2),
    "denies every queue": Lie(pace=0.01),
}


def beset(lie: Lie | None, honest: int = 1, seed: int = 1) -> BesetUplink:
    """Honest prompts at 0.1 s, and from 3 s on beside the hostile link's bulk; decodes on every honest link."""
    line = BesetUplink(lie, honest, seed)
    if lie is not None:
        line.ask_always(0.6, 12.0)
    for link in range(1, honest + 1):
        line.prompts(link, [0.1, *(at_s + 0.3 * link for at_s in PROMPTS_S)])
        line.every(link, 8 * 1024, 0.04, 12.0, 0.2)
    return line


def prompt_s(line: BesetUplink, link: int = 1) -> list[float]:
    delays_s = line.delays_s(link, PREFILL, 2.0)
    assert len(delays_s) == len(PROMPTS_S)
    return delays_s


@cache
def beside_a_rival_s(honest: int) -> list[float]:
    """The longest time of a prompt on each honest link, where the hostile one tells no lie."""
    line = beset(Lie(), honest)
    line.clock.run(40.0)
    return [max(prompt_s(line, link)) for link in range(1, honest + 1)]


@pytest.mark.parametrize("honest", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", usually(list(LIES)[::2], LIES))
def test_honest_prompts_and_decodes_take_no_longer_than_beside_an_honest_rival(
    name: str, honest: int
) -> None:
    rival_s, line = beside_a_rival_s(honest), beset(LIES[name], honest)
    line.clock.run(40.0)
    for link in range(1, honest + 1):
        assert max(prompt_s(line, link)) <= 1.5 * rival_s[link - 1]
        assert quantile(line.delays_s(link, DECODE, 2.0), 0.5) <= 0.060


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_the_uplink_is_known_all_the_while_that_honest_links_use_it(lie: Lie) -> None:
    line = beset(lie, 2)
    for at_s in PROMPTS_S:
        line.watch(at_s + 0.31, at_s + 0.9)
    line.clock.run(12.0)
    assert line.lowest >= LEAST_PART * RATE
    assert line.highest <= MOST_PARTS * RATE


@pytest.mark.parametrize("lie", GREEDY.values(), ids=GREEDY)
def test_a_receiver_that_takes_all_it_can_leaves_honest_prompts_a_part(lie: Lie) -> None:
    """It fills the socket's buffer before anybody can see; from then on all have their part of the uplink."""
    line = beset(lie)
    line.clock.run(40.0)
    assert max(prompt_s(line)) <= 5.0
    assert quantile(line.delays_s(1, DECODE, 2.0), 0.5) <= 0.15


@pytest.mark.full
@settings(max_examples=examples(25), deadline=None)
@given(
    lie=st.builds(
        Lie,
        held_s=st.floats(0.0, 1.5),
        every_s=st.sampled_from([0.0, 0.01, 0.1, 0.7]),
        chunks=st.sampled_from([1, 2, 10**9]),
        never_after_s=st.one_of(st.just(math.inf), st.floats(0.5, 8.0)),
        pace=st.sampled_from([0.9, 1.0, 1.001, 3.0]),
        jump_s=st.sampled_from([0.0, 0.005, 0.2, 1e6]),
        congested_s=st.sampled_from([0.0, 0.05, 2.0]),
    ),
    honest=st.integers(1, 3),
    seed=st.integers(1, 100),
)
def test_whatever_one_receiver_says_the_uplink_stays_within_a_factor_of_two_while_honest_links_use_it(
    lie: Lie, honest: int, seed: int
) -> None:
    line = beset(lie, honest, seed)
    for at_s in PROMPTS_S:
        line.watch(at_s + 0.3 * honest + 0.01, at_s + 0.3 * honest + 0.4)
    line.clock.run(12.0)
    assert line.lowest >= LEAST_PART * RATE
    assert line.highest <= MOST_PARTS * RATE


def test_a_link_that_comes_after_a_slow_one_is_not_held_to_what_that_one_showed() -> None:
    line = BesetUplink(Lie(every_s=0.05, chunks=1), honest=1)
    line.ask_always(0.0, 12.0)
    line.prompts(1, [6.0])
    line.clock.run(5.9)
    assert (line.uplink.uplink_bytes_per_s or 0.0) < 0.2 * RATE
    line.clock.run(12.0)
    (delay_s,) = line.delays_s(1, PREFILL)
    assert delay_s <= 2.3 * PROMPT_BYTES / RATE
    assert line.uplink.uplink_bytes_per_s == pytest.approx(RATE, rel=0.5)


# -- whose word holds


def measured(
    shared: UplinkRate, shown: LinkEvidence, bytes_per_s: float, seconds: float, sent: list[float]
) -> None:
    """Bulk goes over one link alone for some seconds. `sent`: the clock, and what was sent over all links."""
    for _ in range(round(seconds / 0.01)):
        sent[0] += 0.01
        size_bytes = round(bytes_per_s * 0.01)
        sent[1] += size_bytes
        if shown.rate.record_arrival(sent[0], sent[0] - 0.03, size_bytes, True, 0.03):
            shared.record_measurement(shown, shown.acked_bytes + 4 * size_bytes, sent[0])


@settings(max_examples=examples(15), deadline=None)
@given(part=st.floats(0.05, 0.8), honest_s=st.floats(0.5, 3.0))
def test_what_a_link_has_shown_holds_until_others_have_carried_four_times_its_bytes(
    part: float, honest_s: float
) -> None:
    shared, honest, other, sent = UplinkRate(BottleneckModel()), LinkEvidence(), LinkEvidence(), [0.0, 0.0]
    measured(shared, honest, 5e6, honest_s, sent)
    known = shared.bytes_per_s
    assert known == pytest.approx(5e6, rel=0.01)
    outweighs_s = OUTWEIGHED * honest_s / part
    measured(shared, other, part * 5e6, 0.8 * outweighs_s, sent)
    assert shared.bytes_per_s == known
    measured(shared, other, part * 5e6, 0.3 * outweighs_s + 0.5, sent)
    assert shared.bytes_per_s == pytest.approx(part * 5e6, rel=0.01)
    shared.bulk_begins(honest, sent[0])
    assert shared.bytes_per_s == known, "what matters to a link now is what it has shown itself"


def test_no_link_holds_for_longer_than_some_seconds_of_its_rate() -> None:
    shared, fast, slow, sent = UplinkRate(BottleneckModel()), LinkEvidence(), LinkEvidence(), [0.0, 0.0]
    measured(shared, fast, 5e6, 10 * HOLDS_S, sent)
    measured(shared, slow, 2.5e6, 2 * OUTWEIGHED * HOLDS_S + 1.0, sent)
    assert shared.bytes_per_s == pytest.approx(2.5e6, rel=0.01)


def test_the_word_of_a_link_that_is_gone_holds_on_and_only_one_such_is_kept() -> None:
    shared, sent = UplinkRate(BottleneckModel()), [0.0, 0.0]
    for rate in (1e6, 5e6, 2e6, 3e6):
        link = LinkEvidence()
        measured(shared, link, rate, 1.0, sent)
        shared.forget_link(link)
    assert shared.bytes_per_s == pytest.approx(5e6, rel=0.01)
    assert shared.heard == 1


def test_a_line_that_proves_to_be_faster_is_free_the_sooner() -> None:
    line = BottleneckModel()
    line.record_sent(100_000, 1e4, 0.0)
    assert line.queued_s(1.0) == pytest.approx(9.0)
    line.speed_up(100.0, 1.0)
    assert line.queued_s(1.0) == pytest.approx(0.09)
    line.speed_up(2.0, 5.0)
    assert line.queued_s(5.0) == 0.0


@given(sent=st.lists(st.tuples(st.integers(1, 64 * 1024), st.floats(0.0, 0.02)), min_size=1, max_size=60))
def test_a_link_takes_no_more_off_the_shared_queue_than_it_put_there(sent: list[tuple[int, float]]) -> None:
    line, alone, now_s = BottleneckModel(), BottleneckModel(), 0.0
    for size_bytes, gap_s in sent:
        now_s += gap_s
        for one in (line, alone):
            one.record_sent(50_000, 1e6, now_s)
        predicted = line.record_sent(size_bytes, 1e6, now_s)
        line.record_arrival(predicted, 0.0, now_s, 0.0, 0.0, size_bytes / 1e6)
        assert line.queued_s(now_s) >= alone.queued_s(now_s) - 1e-9


# -- parts


def test_who_has_had_more_than_its_part_waits_while_another_complains_and_no_longer() -> None:
    parts, greedy, meek = FairShareGuard(), LinkShare(), LinkShare()
    for number in range(100):
        greedy.record_sent(50_000, 0.01 * number)
    assert parts.wait_s(greedy, 2.5e6, 1.0) == 0.0, "nobody complains"
    parts.report_queue(meek, COMPLAINT_S / 2, 2.5e6, 1.0)
    assert parts.wait_s(greedy, 2.5e6, 1.0) == 0.0, "a queue as it should be"
    parts.report_queue(meek, 2 * COMPLAINT_S, 2.5e6, 1.0)
    assert parts.wait_s(greedy, 2.5e6, 1.0) > 0.0
    assert parts.wait_s(meek, 2.5e6, 1.0) == 0.0
    assert parts.wait_s(greedy, math.inf, 1.0) == 0.0, "nothing is known of the uplink"
    assert parts.wait_s(greedy, 2.5e6, 1.0 + HEEDED_S) == 0.0


@given(
    sent=st.lists(st.tuples(st.integers(1, 256 * 1024), st.floats(0.0, 0.3)), max_size=60),
    fair=st.floats(1e4, 1e8),
)
def test_no_complaint_pushes_a_link_below_its_part(sent: list[tuple[int, float]], fair: float) -> None:
    parts, honest, liar, now_s = FairShareGuard(), LinkShare(), LinkShare(), 1.0
    for size_bytes, gap_s in sent:
        now_s += gap_s
        parts.report_queue(liar, 1e9, fair, now_s)
        sent_bytes, seconds = honest.recent(now_s)
        assert (parts.wait_s(honest, fair, now_s) > 0.0) == (sent_bytes / fair > seconds)
        honest.record_sent(size_bytes, now_s)


def test_bulk_behind_what_nobody_acknowledges_is_its_links_own_affair() -> None:
    uplink = Uplink()
    for link in (1, 2, 3):
        uplink.open(link, 0.0)
        uplink.push(link, Outgoing(1, PREFILL, MIB), 0.0)
    sequence = {1: 0, 2: 0, 3: 0}
    now_s = 0.0
    while now_s < STALLED_S + 1.0:
        now_s += 0.05
        for link in (1, 2, 3):
            while isinstance(uplink.next(link, now_s), Send):
                sequence[link] += 1
            if link != 3:
                uplink.acked(link, sequence[link], [(sequence[link], now_s - 0.01)], now_s)
                uplink.push(link, Outgoing(10 + sequence[link], PREFILL, MIB), now_s)
    assert uplink.links_waiting() == 2
    assert uplink.links_waiting(PREFILL) == 2
    uplink.acked(3, 1, [(1, now_s)], now_s)
    assert uplink.links_waiting() == 3
    assert uplink.links_waiting(PREFILL) == 3
    uplink.close(3)
    assert uplink.links_waiting() == 2


def test_a_link_that_stalls_and_is_closed_or_emptied_is_counted_right() -> None:
    uplink = Uplink()
    for link in (1, 2):
        uplink.open(link, 0.0)
        uplink.push(link, Outgoing(1, PREFILL, MIB, (b"a",)), 0.0)
        uplink.next(link, 0.0)
    uplink.next(1, STALLED_S + 1.0)
    assert uplink.links_waiting() == 0
    uplink.cancel(b"a", 3.0)
    uplink.push(1, Outgoing(2, PREFILL, MIB, (b"a",)), 3.0)
    assert uplink.links_waiting() == 0
    uplink.acked(1, 1, (), 3.1)
    uplink.acked(2, 1, (), 3.1)
    assert uplink.links_waiting() == uplink.links_waiting(PREFILL) == 1
