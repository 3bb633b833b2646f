"""What a peer learns from its links, and when that is worth telling the swarm. No sockets but in the last test."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from support.links.data_plane import SPEC, End, asynchronous, soon, until
from support.links.delaying_relay import DelayingRelay
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import Coordinate, PeerFacts, PeerView, RelayAt
from molink.peer.announcing.prober import NEIGHBOURS, Prober
from molink.peer.wire.link import link as link_module
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.transport import keepalive
from molink.routing import Snapshot, plan
from molink.routing.latency.coordinates import START, USABLE_ERROR, predicted_rtt_ms
from molink.shards.spec import Span

IDENTITIES = [Identity.generate() for _ in range(NEIGHBOURS + 4)]
OWN_ID = Identity.generate().peer_id


class FakeLink:
    """Answers after as long as it says, or never."""

    def __init__(self, rtt_ms: float | None, *, relayed: bool) -> None:
        self.rtt_ms = rtt_ms
        self.relayed = relayed

    async def measured(self) -> float:
        if self.rtt_ms is None:
            raise TimeoutError
        return self.rtt_ms


class FakeLinks:
    """What a prober uses of Links; `rtts_ms` may be changed between probes, None means silence."""

    def __init__(self, rtts_ms: dict[str, float | None]) -> None:
        self.rtts_ms = rtts_ms
        self.open: set[str] = set()
        self.relayed: set[str] = set()

    def find(self, peer_id: str) -> FakeLink | None:
        return self._link(peer_id) if peer_id in self.open else None

    async def to(self, facts: PeerFacts) -> FakeLink:
        if facts.peer_id not in self.rtts_ms:
            raise LinkError(facts.peer_id, "nobody answers there")
        self.open.add(facts.peer_id)
        return self._link(facts.peer_id)

    def is_relayed(self, link: FakeLink) -> bool:
        return link.relayed

    def _link(self, peer_id: str) -> FakeLink:
        return FakeLink(self.rtts_ms[peer_id], relayed=peer_id in self.relayed)


def at(x: float, y: float = 0.0, *, error: float = 0.2) -> Coordinate:
    return Coordinate((x, y, 0.0, 0.0), 5.0, error)


def view_of(identity: Identity, coordinate: Coordinate | None = None) -> PeerView:
    facts = replace(facts_of(identity), coordinate=coordinate)
    return PeerView(facts, state_of(identity), 0.0)


def prober_of(links: FakeLinks, views: Callable[[], tuple[PeerView, ...]]) -> Prober:
    return Prober(OWN_ID, cast("Links", links), views)


def ring(count: int) -> list[PeerView]:
    """Peers around the origin, and not in one plane through it."""
    places = [
        (90.0, 0.0),
        (0.0, 90.0),
        (-90.0, 0.0),
        (0.0, -90.0),
        (60.0, 60.0),
        (-60.0, 60.0),
        (-60.0, -60.0),
    ]
    return [
        view_of(identity, at(*place)) for identity, place in zip(IDENTITIES, places[:count], strict=False)
    ]


def true_rtts(views: list[PeerView], home: Coordinate) -> dict[str, float | None]:
    return {
        view.peer_id: predicted_rtt_ms(home, view.facts.coordinate)
        for view in views
        if view.facts.coordinate is not None
    }


@asynchronous
async def test_what_was_measured_is_announced_once() -> None:
    views = tuple(view_of(identity) for identity in IDENTITIES[:3])
    links = FakeLinks({views[0].peer_id: 12.0, views[1].peer_id: None})
    prober = prober_of(links, lambda: views)
    assert await prober.probe()
    assert [(one.peer_id, one.rtt_ms) for one in prober.measurements()] == [(views[0].peer_id, 12.0)]
    assert not await prober.probe()


@pytest.mark.parametrize(("rtt_ms", "worth"), [(13.0, False), (9.0, False), (17.0, True), (7.0, True)])
def test_a_round_trip_is_announced_anew_when_it_has_changed_by_more_than_noise(
    rtt_ms: float, worth: bool
) -> None:
    @asynchronous
    async def scenario() -> None:
        view = view_of(IDENTITIES[0])
        links = FakeLinks({view.peer_id: 12.0})
        prober = prober_of(links, lambda: (view,))
        await prober.probe()
        links.rtts_ms[view.peer_id] = rtt_ms
        assert await prober.probe() is worth
        assert prober.measurements()[0].rtt_ms == (rtt_ms if worth else 12.0)

    scenario()


@asynchronous
async def test_no_more_than_the_allowed_neighbours_are_dialled_and_who_is_linked_stays() -> None:
    views = tuple(view_of(identity) for identity in IDENTITIES)
    links = FakeLinks(dict.fromkeys((view.peer_id for view in views), 10.0))
    prober = prober_of(
        links, lambda: (*views, replace(views[0], facts=replace(views[0].facts, peer_id=OWN_ID)))
    )
    await prober.probe()
    chosen = set(links.open)
    assert len(chosen) == NEIGHBOURS
    assert not await prober.probe()
    assert links.open == chosen


@asynchronous
async def test_a_peer_begins_at_the_start_and_says_so() -> None:
    prober = prober_of(FakeLinks({}), tuple)
    assert prober.coordinate == START
    assert not await prober.probe()
    assert prober.coordinate == START


@asynchronous
async def test_a_peer_finds_its_place_among_neighbours_and_then_is_quiet() -> None:
    views, home = ring(7), at(30.0, -20.0)
    prober = prober_of(FakeLinks(true_rtts(views, home)), lambda: tuple(views))
    said = [await prober.probe() for _ in range(60)]
    stranger = at(-70.0, 10.0)
    assert prober.coordinate.error <= USABLE_ERROR
    assert predicted_rtt_ms(prober.coordinate, stranger) == pytest.approx(
        predicted_rtt_ms(home, stranger), rel=0.25
    )
    assert said[0]
    assert not any(said[20:])
    assert sum(said) < 10


@asynchronous
async def test_a_relays_detour_is_neither_announced_nor_moves_a_coordinate() -> None:
    views, home = ring(8), at(30.0, -20.0)
    rtts = true_rtts(views, home)
    without = prober_of(FakeLinks(dict(rtts)), lambda: tuple(views[1:]))
    links = FakeLinks({**rtts, views[0].peer_id: 900.0})
    links.relayed = {views[0].peer_id}
    prober = prober_of(links, lambda: tuple(views))
    for _ in range(5):
        await prober.probe()
        await without.probe()
    assert prober.measurements() == without.measurements()
    assert prober.coordinate == without.coordinate


@asynchronous
async def test_two_that_nobody_can_dial_measure_a_link_that_stands_and_dial_each_other_for_nothing() -> None:
    hidden = [
        replace(
            view, facts=replace(view.facts, grpc_addresses=(), relays=(RelayAt(OWN_ID, "192.0.2.9:4003"),))
        )
        for view in ring(3)
    ]
    punched, relayed, unlinked = (view.peer_id for view in hidden)
    links = FakeLinks({punched: 41.0, relayed: 64.0, unlinked: 30.0})
    links.open, links.relayed = {punched, relayed}, {relayed}
    views = list(hidden)
    prober = prober_of(links, lambda: tuple(views))
    assert not await prober.probe(), "others measure who can be dialled"
    views.append(replace(hidden[0], facts=replace(hidden[0].facts, peer_id=OWN_ID)))
    assert await prober.probe()
    assert [(one.peer_id, one.rtt_ms) for one in prober.measurements()] == [(punched, 41.0)]
    assert links.open == {punched, relayed}


@asynchronous
async def test_few_neighbours_are_no_reason_to_be_sure() -> None:
    views, home = ring(4), at(30.0, -20.0)
    prober = prober_of(FakeLinks(true_rtts(views, home)), lambda: tuple(views))
    for _ in range(60):
        await prober.probe()
    assert prober.coordinate.error > USABLE_ERROR


@asynchronous
async def test_a_peer_that_moves_house_says_so() -> None:
    views = ring(7)
    links = FakeLinks(true_rtts(views, at(30.0, -20.0)))
    prober = prober_of(links, lambda: tuple(views))
    for _ in range(60):
        await prober.probe()
    links.rtts_ms = true_rtts(views, at(-50.0, 40.0))
    assert await prober.probe()
    for _ in range(60):
        await prober.probe()
    stranger = at(80.0, 0.0)
    found = predicted_rtt_ms(prober.coordinate, stranger)
    assert found == pytest.approx(predicted_rtt_ms(at(-50.0, 40.0), stranger), rel=0.3)


@asynchronous
async def test_a_peer_whose_neighbours_have_moved_on_the_map_moves_along_and_says_so() -> None:
    views = ring(7)
    prober = prober_of(FakeLinks(true_rtts(views, at(30.0, -20.0))), lambda: tuple(views))
    for _ in range(20):
        await prober.probe()
    assert not await prober.probe()
    for row, view in enumerate(views):
        x, y, *_ = view.facts.coordinate.position if view.facts.coordinate is not None else ()
        views[row] = replace(view, facts=replace(view.facts, coordinate=at(x + 100.0, y)))
    assert any([await prober.probe() for _ in range(20)])
    assert prober.coordinate.position[0] == pytest.approx(130.0, abs=30.0)


@asynchronous
async def test_a_peer_that_has_become_sure_of_where_it_was_says_so() -> None:
    views = ring(7)
    rtts_ms = true_rtts(views, START)
    known, unknown = tuple(views), tuple(view_of(identity) for identity in IDENTITIES[:7])
    shown = [unknown]
    prober = prober_of(FakeLinks(rtts_ms), lambda: shown[0])
    assert await prober.probe()
    assert (prober.coordinate, await prober.probe()) == (START, False)
    shown[0] = known
    assert any([await prober.probe() for _ in range(10)])
    assert prober.coordinate.error < START.error / 2


@asynchronous
async def test_a_neighbour_without_a_coordinate_and_a_round_trip_of_nothing_move_nobody() -> None:
    views = (view_of(IDENTITIES[0]), view_of(IDENTITIES[1], at(50.0)))
    prober = prober_of(FakeLinks({views[0].peer_id: 40.0, views[1].peer_id: 0.0}), lambda: views)
    await prober.probe()
    assert prober.coordinate == START


def measure_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "TICK_S", 0.04)
    monkeypatch.setattr(keepalive, "IDLE_PING_INTERVAL_S", 0.04)
    monkeypatch.setattr(keepalive, "RTT_SPAN_S", 0.04)


async def probed_until(prober: Prober, holds: Callable[[], bool]) -> None:
    """Probes until its measurements are so: a busy machine answers pings late now and then. It must have said so."""
    is_told = False
    while not holds():
        is_told |= await prober.probe()
    assert is_told


@asynchronous
async def test_a_link_that_slows_down_and_recovers_is_announced_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real link over a real, slow connection; only its pings are closer together than in life."""
    measure_often(monkeypatch)
    async with End() as near, End() as far, DelayingRelay(_port(far.facts)) as relay:
        facts = replace(far.facts, grpc_addresses=(f"127.0.0.1:{relay.port}",))
        view = PeerView(facts, state_of(far.identity), 0.0)
        prober = Prober(near.peer_id, near.links, lambda: (view,))
        relay.delay_s = 0.03
        assert await soon(prober.probe())
        assert prober.measurements()[0].rtt_ms >= 60.0
        link = near.links.find(far.peer_id)
        assert link is not None
        relay.delay_s = 0.1
        await until(lambda: (link.rtt_ms or 0.0) >= 200.0)
        assert await soon(prober.probe())
        assert prober.measurements()[0].rtt_ms >= 200.0
        relay.delay_s = 0.0
        await soon(probed_until(prober, lambda: prober.measurements()[0].rtt_ms < 150.0))


@asynchronous
async def test_what_a_peer_announces_of_slow_links_changes_the_circuit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real links over relays: the front half's peer measures two holders of the back half, whose links change."""
    measure_often(monkeypatch)
    async with (
        End() as front,
        End() as one,
        End() as two,
        DelayingRelay(_port(one.facts)) as to_one,
        DelayingRelay(_port(two.facts)) as to_two,
    ):
        backs = (_holder(one, Span(3, 6), to_one.port), _holder(two, Span(3, 6), to_two.port))
        prober = Prober(front.peer_id, front.links, lambda: backs)

        def circuit() -> tuple[str, ...]:
            told = _holder(front, Span(0, 3), _port(front.facts))
            told = replace(told, facts=replace(told.facts, links=prober.measurements()))
            return plan(Snapshot((told, *backs), SPEC), 10).peer_ids

        to_one.delay_s = 0.1
        await soon(prober.probe())
        assert circuit() == (front.peer_id, two.peer_id)
        to_one.delay_s, to_two.delay_s = 0.0, 0.1
        await until(lambda: _rtt_ms(front, one) < 150.0 and _rtt_ms(front, two) >= 200.0)
        assert circuit() == (front.peer_id, two.peer_id)  # nobody has said anything yet
        await soon(probed_until(prober, lambda: circuit() == (front.peer_id, one.peer_id)))


def _holder(end: End, span: Span, port: int) -> PeerView:
    """A peer that holds `span` and nothing else, dialled at `port`."""
    facts = replace(end.facts, grpc_addresses=(f"127.0.0.1:{port}",), span_limit=span)
    return PeerView(facts, replace(state_of(end.identity), spans=(span,), free_weight_bytes=0), 0.0)


def _rtt_ms(end: End, other: End) -> float:
    link = end.links.find(other.peer_id)
    return 0.0 if link is None or link.rtt_ms is None else link.rtt_ms


def _port(facts: PeerFacts) -> int:
    return int(facts.grpc_addresses[0].rsplit(":", 1)[1])
