"""What the doctor found is told with what to do about it, and nothing that needs mending is told without."""

from dataclasses import replace

import pytest
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.gossip.sequences import SET_ASIDE
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PROTOCOL_VERSION, PeerView, RelayAt
from molink.peer.commands.checks import (
    Check,
    clock_check,
    device_checks,
    disk_checks,
    kind_of_router,
    local_check,
    port_mapping_check,
    reach_checks,
    swarm_check,
    version_checks,
)
from molink.peer.reach.port_mapping import GatewayError
from molink.peer.reach.reachability import RelayAnswer
from molink.peer.reach.survey import Survey, SurveyedRelay, Trial

NOW_S = 1.7e9
OWN = ("192.168.1.2",)


def relay(observed: str, *, found: bool | None = True, round_trip_s: float = 0.02) -> SurveyedRelay:
    at = RelayAt("relay", "192.0.2.1:443")
    return SurveyedRelay(at, round_trip_s, RelayAnswer(at, 0.1, observed, found))


def view_at(clock_s: float, protocol_version: int = PROTOCOL_VERSION) -> PeerView:
    identity = Identity.generate()
    facts = replace(facts_of(identity), protocol_version=protocol_version)
    return PeerView(facts, replace(state_of(identity), sequence=int(clock_s * 1000)), 0.0)


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_a_machine_that_relays_reach_has_nothing_to_mend() -> None:
    survey = Survey((relay("198.51.100.7:5000"), relay("198.51.100.7:5000")), hard=False, trials=())
    checks = reach_checks(survey, OWN, 4002)
    assert {check.state for check in checks} == {"ok"}
    assert named(checks, "dialable").found == "2 of 2 relays reach port 4002"
    assert "198.51.100.7" in named(checks, "address").found
    assert kind_of_router(survey, OWN) == "cone"


def test_a_router_that_would_map_ports_is_told_of_and_one_that_would_not_with_what_to_do() -> None:
    check = port_mapping_check("203.0.113.7")
    assert (check.state, check.remedy) == ("ok", "")
    assert "--port-mapping on" in check.found
    check = port_mapping_check(GatewayError("no router answers UPnP", "switch it on"))
    assert (check.state, check.found) == ("note", "no router answers UPnP")
    assert check.remedy == "if others cannot dial this machine, switch it on"


def test_a_machine_that_relays_do_not_reach_is_told_which_port_to_forward() -> None:
    survey = Survey((relay("198.51.100.7:5000", found=False),), hard=True, trials=())
    checks = reach_checks(survey, OWN, 4002)
    assert named(checks, "dialable").state == "note"
    assert "forward TCP port 4002" in named(checks, "dialable").remedy
    assert named(checks, "router").found.startswith("hard")
    assert named(checks, "router").remedy


def test_a_machine_that_others_see_at_its_own_address_has_no_router() -> None:
    survey = Survey((relay("192.168.1.2:5000"),), hard=None, trials=())
    assert kind_of_router(survey, OWN) == "none"
    assert kind_of_router(Survey((), hard=None, trials=()), OWN) == "unknown"


def test_a_peer_on_this_machine_alone_is_told_how_to_open_it() -> None:
    check = local_check("127.0.0.1")
    assert "127.0.0.1" in check.found
    assert "--listen 0.0.0.0" in check.remedy


def test_several_outer_addresses_and_distant_or_silent_relays_are_noted() -> None:
    at = RelayAt("gone", "192.0.2.9:443")
    relays = (
        relay("198.51.100.7:5000"),
        relay("198.51.100.8:5000", round_trip_s=0.3),
        SurveyedRelay(at, None, None),
        SurveyedRelay(at, 0.1, None),
    )
    checks = reach_checks(Survey(relays, hard=False, trials=()), OWN, 4002)
    assert "--announce" in named(checks, "address").remedy
    assert [check.state for check in checks if check.name == "relay"] == ["ok", "note", "note", "note"]


@pytest.mark.parametrize("way", ["direct", "reversed", "relayed", "punched"])
def test_a_way_that_fails_names_what_to_do_and_one_that_works_its_time(way: str) -> None:
    failed, worked, untried = (
        reach_checks(Survey((), hard=None, trials=(trial,)), OWN, 1)[-1]
        for trial in (
            Trial(way, "peer", why_not="it cannot be reached"),
            Trial(way, "peer", 0.25, 41.0),
            Trial(way, "", why_not="there is nobody"),
        )
    )
    assert failed.state != "ok"
    assert failed.remedy
    assert (worked.state, worked.found) == ("ok", "usable in 0.25 s to peer, then 41 ms a round trip")
    assert "there is nobody" in untried.found


@pytest.mark.parametrize(
    ("ahead_s", "state"),
    [
        (0.0, "ok"),
        (-100.0, "ok"),
        (300.0, "note"),
        (-500.0, "note"),
        (5000.0, "problem"),
        (-1300.0, "problem"),
    ],
)
def test_a_clock_that_differs_from_the_swarms_is_told(ahead_s: float, state: str) -> None:
    views = [view_at(NOW_S), view_at(NOW_S), view_at(NOW_S + 1e6)]
    (check,) = clock_check(views, NOW_S + ahead_s)
    assert check.state == state
    assert bool(check.remedy) == (state != "ok")
    assert clock_check([], NOW_S) == []


def test_a_right_clock_is_not_called_late_by_peers_that_have_started_again() -> None:
    started_again = NOW_S + SET_ASIDE / 1000
    assert clock_check([view_at(started_again)] * 3, NOW_S)[0].state == "ok"
    (late,) = clock_check([view_at(NOW_S)] * 3, NOW_S - 500)
    assert late.found == "200 to 500 s behind the swarm's"


def test_disk_device_and_versions_are_told_with_their_remedies() -> None:
    disks = disk_checks(
        {"--state-dir": ("/a", None), "--store-dir": ("/b", 10**9), "--other": ("/c", 10**12)}
    )
    assert [check.state for check in disks] == ["problem", "note", "ok"]
    assert "--state-dir" in disks[0].remedy
    assert device_checks("a processor", (), None)[0].state == "ok"
    assert device_checks("a processor", ("NVIDIA card (no driver)",), "install it")[0].remedy == "install it"
    newer = [view_at(NOW_S, PROTOCOL_VERSION + 1)]
    assert version_checks({"molink": "0.1.0"}, newer)[0].remedy == "pip install --upgrade molink"
    assert version_checks({"molink": "0.1.0"}, [view_at(NOW_S)])[0].state == "ok"


def test_the_swarm_is_found_or_not_or_not_named() -> None:
    assert swarm_check((), (), "").state == "note"
    assert swarm_check(("/ip4/192.0.2.1/tcp/1/p2p/x",), (), "nobody answers").state == "problem"
    assert swarm_check(("/ip4/192.0.2.1/tcp/1/p2p/x",), [view_at(NOW_S)], "").found == "1 peer found"
