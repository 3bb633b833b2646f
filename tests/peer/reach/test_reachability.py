"""What a peer concludes from what relays say of it, and what it announces then."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.dialable import ANYWHERE, own_ranges
from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import AnnouncementError, sign_facts, verify_facts
from molink.dht.records.records import PeerFacts, PeerState, PeerView, RelayAt
from molink.peer.reach.reachability import (
    Finding,
    Reachable,
    RelayAnswer,
    announced,
    apart,
    candidates,
    contradicted,
    is_out_of_reach,
    judge,
    relays_to_tell,
    stays_for,
)
from molink.peer.reach.relay_limits import PairPaces, offered_mbps, relay_limits

OWN = Identity.generate()
RELAYS = tuple(RelayAt(Identity.generate().peer_id, f"198.51.{at}.1:443") for at in range(8))


def answer(found: bool | None, at: int = 0, observed: str = "203.0.113.10:4000") -> RelayAnswer:
    return RelayAnswer(RELAYS[at], 0.1 * (at + 1), observed, found)


def view(relay_address: str) -> PeerView:
    facts = replace(facts_of(Identity.generate()), relay_address=relay_address)
    state = PeerState(facts.peer_id, 1, 60, 1, (), 0, 0, 0, 0)
    return PeerView(facts, state, 0.0)


def at_home() -> PeerFacts:
    return replace(
        facts_of(OWN),
        addresses=(f"/ip4/192.168.1.2/tcp/4001/p2p/{OWN.peer_id}",),
        grpc_addresses=("192.168.1.2:4002",),
    )


@pytest.mark.parametrize(
    ("found", "reachable"),
    [
        ([True, True, False], Reachable.DIALABLE),
        ([True, False, False], Reachable.RELAYED),
        ([True, True], Reachable.DIALABLE),
        ([True, False], Reachable.RELAYED),
        ([True, None, None], Reachable.DIALABLE),
        ([False], Reachable.RELAYED),
        ([None, None], Reachable.UNKNOWN),
        ([], Reachable.UNKNOWN),
    ],
)
def test_more_than_half_of_those_that_dialled_back_decide(
    found: list[bool | None], reachable: Reachable
) -> None:
    assert judge([answer(one, at) for at, one in enumerate(found)]).reachable is reachable


def test_relays_that_answer_are_ranked_by_how_near_they_are() -> None:
    assert judge([answer(None, 2), answer(None, 0), answer(None, 1)]).near == RELAYS[:3]


def test_a_peer_that_nobody_can_dial_announces_its_relays_and_no_address() -> None:
    facts = announced(at_home(), Finding(Reachable.RELAYED), RELAYS[:2], relay_port=443)
    assert (facts.addresses, facts.grpc_addresses, facts.relay_address) == ((), (), "")
    assert facts.relays == RELAYS[:2]
    assert b"192.168" not in sign_facts(replace(facts, ttl_s=60), OWN)


@pytest.mark.parametrize("hard", [True, False, None])
def test_only_who_cannot_be_dialled_and_is_known_not_to_be_hard_announces_a_cone(hard: bool | None) -> None:
    relayed = announced(at_home(), Finding(Reachable.RELAYED), RELAYS[:2], None, hard=hard)
    assert relayed.cone == (hard is False)
    assert verify_facts(sign_facts(replace(relayed, ttl_s=60), OWN)).cone == relayed.cone
    assert not announced(relayed, Finding(Reachable.DIALABLE, "203.0.113.10"), (), None, hard=hard).cone


def test_a_peer_behind_a_router_that_passes_ports_on_announces_the_routers_address() -> None:
    facts = announced(at_home(), Finding(Reachable.DIALABLE, "203.0.113.10"), (), relay_port=443)
    assert facts.grpc_addresses == ("203.0.113.10:4002",)
    assert facts.addresses == (f"/ip4/203.0.113.10/tcp/4001/p2p/{OWN.peer_id}",)
    assert facts.relay_address == "203.0.113.10:443"
    assert facts.relays == ()


@pytest.mark.parametrize("finding", [Finding(Reachable.UNKNOWN), Finding(Reachable.DIALABLE, "192.168.1.2")])
def test_where_nobody_says_otherwise_addresses_are_as_the_owner_set_them_up(finding: Finding) -> None:
    assert announced(at_home(), finding, (), None) == at_home()


def test_relays_are_asked_in_many_networks_and_only_where_the_swarm_is() -> None:
    views = [view(f"198.51.100.{at}:443") for at in range(5)] + [view("203.0.113.1:443")]
    views += [view("192.168.1.7:443"), view("127.0.0.1:443"), view("relay.example.org:443"), view("")]
    found = candidates(views, "", own_ranges(()), random.Random(1))
    assert len(found) == 6
    assert "203.0.113.1:443" in [relay.address for relay in found[:2]]
    assert not [relay for relay in found if relay.address.startswith(("192", "127", "relay"))]
    assert candidates([view("127.0.0.1:443")], "", ANYWHERE, random.Random(1))


@pytest.mark.parametrize(
    ("found", "observed", "is_contradicted"),
    [
        ([False, False], "203.0.113.10:4000", True),
        ([False, False, None], "203.0.113.10:4000", True),
        ([False], "203.0.113.10:4000", False),
        ([False, False, True], "203.0.113.10:4000", False),
        ([False, False], "203.0.113.99:4000", False),
        ([], "", False),
    ],
)
def test_an_owner_is_contradicted_by_two_relays_that_looked_where_he_says(
    found: list[bool | None], observed: str, is_contradicted: bool
) -> None:
    answers = [answer(one, at, observed) for at, one in enumerate(found)]
    assert contradicted("203.0.113.10:4002", answers) is is_contradicted


def test_stays_are_kept_and_new_ones_are_in_other_networks() -> None:
    near = (RelayAt("a", "198.51.100.1:1"), RelayAt("b", "198.51.100.2:1"), RelayAt("c", "203.0.113.1:1"))
    assert apart(near) == (near[0], near[2], near[1])
    assert stays_for((RELAYS[0],), near) == (RELAYS[0], near[0], near[2])


@pytest.mark.parametrize(
    ("told", "stays", "expected"),
    [
        ((), (0, 1), (0, 1)),
        ((0,), (0, 1, 2), (0, 1, 2)),
        ((0, 1), (0, 1, 2), (0, 1, 2)),
        ((0, 1, 2), (1, 2, 3), (0, 1, 2)),
        ((0, 1, 2), (1, 2), (0, 1, 2)),
        ((0, 1, 2), (2, 3, 4), (2, 3, 4)),
        ((0, 1), (1,), (0, 1)),
        ((0, 1), (2,), (2,)),
        ((0, 1, 2), (), ()),
    ],
)
def test_what_was_told_of_relays_holds_on_until_few_of_them_are_stays(
    told: tuple[int, ...], stays: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = relays_to_tell([RELAYS[at] for at in told], [RELAYS[at] for at in stays])
    assert found == tuple(RELAYS[at] for at in expected)


def test_relays_of_facts_come_out_as_they_went_in_and_are_bounded() -> None:
    facts = replace(facts_of(OWN), relays=RELAYS[:3], relay_address="[2001:db8::1]:443", ttl_s=60)
    read = verify_facts(sign_facts(facts, OWN))
    assert (read.relays, read.relay_address) == (RELAYS[:3], "[2001:db8::1]:443")
    for wrong in (
        replace(facts, relays=RELAYS[:4]),
        replace(facts, relay_address="nowhere"),
        replace(facts, relays=(RelayAt(RELAYS[0].peer_id, "198.51.100.1"),)),
    ):
        with pytest.raises(AnnouncementError):
            sign_facts(wrong, OWN)


def test_a_tenth_of_the_uplink_is_offered_and_at_most_twenty_megabits() -> None:
    assert offered_mbps("auto", 100.0) == 10.0
    assert offered_mbps("auto", 1000.0) == 20.0
    assert offered_mbps("auto", None) == 5.0
    assert offered_mbps("40", 100.0) == 40.0
    assert offered_mbps("off", 100.0) is None


@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 1_000_000, None])
def test_a_relay_takes_an_eighth_of_the_descriptors_at_most_and_nobody_all_of_it(
    descriptors: int | None,
) -> None:
    limits = relay_limits(descriptors)
    assert limits.unproven + limits.proven + 2 * limits.pairs <= (descriptors or 10**6) // 8
    assert min(limits.of_network, limits.stays) < limits.proven
    assert max(limits.pairs_of_identity, limits.pairs_of_network) < limits.pairs


def passed_on(loads_bytes_per_s: Sequence[float], part_bytes: int = 8192) -> list[float]:
    """Bytes a second that each of these pairs passes on in 20 s over a relay that gives away 1 MB/s."""
    now = [0.0]
    paces = PairPaces(lambda: (1_000_000.0, len(loads_bytes_per_s)), lambda: now[0])
    pairs = [paces.pace() for _ in loads_bytes_per_s]
    passed = [0] * len(pairs)
    due = [0.0] * len(pairs)
    while now[0] < 20.0:
        at = min(range(len(pairs)), key=due.__getitem__)
        now[0] = max(now[0], due[at])
        passed[at] += part_bytes
        due[at] = now[0] + max(pairs[at](part_bytes), part_bytes / loads_bytes_per_s[at])
    return [each / 20.0 for each in passed]


def test_pairs_pass_on_the_relays_rate_and_no_more() -> None:
    for loads in ([1e9], [1e9, 1e9], [1e9] * 10):
        rates = passed_on(loads)
        assert 1_000_000 <= sum(rates) <= 1_060_000
        assert max(rates) <= 1.2 * min(rates)


def test_what_pairs_leave_of_their_part_goes_to_those_that_have_use_for_it_and_no_more() -> None:
    busy, *idle = passed_on([1e9, *[1000.0] * 30], 1000)
    assert busy >= 900_000
    assert idle == pytest.approx([1000.0] * 30, rel=0.2)
    *_, moderate = passed_on([1e9, 1e9, 200_000.0])
    assert moderate >= 190_000


@pytest.mark.parametrize(
    ("own", "others", "out_of_reach"),
    [
        (["192.168.1.2:4002"], ["203.0.113.7:4002"], True),
        (["192.168.1.2:4002"], ["/ip4/192.168.1.9/tcp/4001/p2p/peer", "203.0.113.7:4002"], False),
        (["100.64.0.2:4002", "192.168.1.2:4002"], ["203.0.113.7:4002"], True),
        (["192.168.1.2:4002", "198.51.100.3:4002"], ["203.0.113.7:4002"], False),
        (["[2001:db8::1]:4002"], ["203.0.113.7:4002"], False),
        (["home.example.org:4002"], ["203.0.113.7:4002"], False),
        (["192.168.1.2:4002"], [], False),
        ([], ["203.0.113.7:4002"], False),
    ],
)
def test_an_address_that_the_swarm_dials_is_public_or_in_a_range_of_others(
    own: list[str], others: list[str], out_of_reach: bool
) -> None:
    assert is_out_of_reach(own, others) is out_of_reach
