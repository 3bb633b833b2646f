"""A survey tries each way once, on loopback as if it were the Internet, and disturbs nobody."""

from dataclasses import replace

from support.links.data_plane import End, asynchronous, soon
from support.links.reach_ends import RelayedEnd, RelayEnd
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.dialable import ANYWHERE
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts, PeerState, PeerView, RelayAt
from molink.peer.reach.asking import Doorstep
from molink.peer.reach.survey import Survey, Surveyor, Trial
from molink.peer.wire.link.certificate import certificate_hash


def view_of(facts: PeerFacts) -> PeerView:
    return PeerView(facts, PeerState(facts.peer_id, 1, 60, 1, (), 0, 0, 0, 0), 0.0)


def relaying(relay: RelayAt) -> PeerView:
    facts = facts_of(Identity.generate())
    return view_of(replace(facts, peer_id=relay.peer_id, grpc_addresses=(), relay_address=relay.address))


def trial(survey: Survey, way: str) -> Trial:
    (found,) = (one for one in survey.trials if one.way == way)
    return found


async def surveyed(views: list[PeerView], own_peer_id: str = "", sought: Doorstep | None = None) -> Survey:
    async with Surveyor(("127.0.0.1", 0), None, ANYWHERE) as surveyor:
        return await soon(surveyor.survey(views, own_peer_id, sought or surveyor.doorstep))


@asynchronous
async def test_relays_say_where_they_see_this_machine_and_whether_they_reach_its_port() -> None:
    async with RelayEnd() as one, RelayEnd() as two:
        survey = await surveyed([relaying(one.at), relaying(two.at)])
        answers = [relay.answer for relay in survey.relays]
        assert {relay.relay for relay in survey.relays} == {one.at, two.at}
        assert all(answer is not None and answer.found for answer in answers)
        assert all(answer is not None and answer.observed.startswith("127.0.0.1:") for answer in answers)
        assert survey.hard is False


@asynchronous
async def test_a_port_with_another_certificate_is_not_reached() -> None:
    async with RelayEnd() as relay:
        survey = await surveyed([relaying(relay.at)], sought=Doorstep(relay.relay.port, bytes(32)))
        (answer,) = (one.answer for one in survey.relays)
        assert answer is not None
        assert not answer.found


@asynchronous
async def test_each_way_is_tried_and_takes_no_link_of_the_peer_beside_it() -> None:
    async with RelayEnd() as relay, End() as near, RelayedEnd() as far, End() as own:
        hidden = await far.stay(relay.at)
        await far.punch(relay.at)
        standing = await soon(own.links.to(near.facts))
        views = [relaying(relay.at), view_of(near.facts), view_of(hidden), view_of(own.facts)]
        sought = Doorstep(
            int(own.facts.grpc_addresses[0].rpartition(":")[2]), certificate_hash(own.facts.certificate)
        )
        survey = await surveyed(views, own.peer_id, sought)
        direct, relayed, punched = (trial(survey, way) for way in ("direct", "relayed", "punched"))
        assert (direct.to, relayed.to, punched.to) == (near.peer_id, relay.at.address, hidden.peer_id)
        assert trial(survey, "reversed").to.startswith("127.0.0.1:"), "where others see this machine"
        assert [one.why_not for one in survey.trials] == [""] * 4
        assert all(one.took_s is not None and one.rtt_ms is not None for one in survey.trials)
        assert standing.closed_because is None
        assert own.links.find(near.peer_id) is standing


@asynchronous
async def test_what_cannot_be_tried_says_why() -> None:
    async with RelayEnd() as gone:
        at = gone.at
    survey = await surveyed([relaying(at)])
    (relay,) = survey.relays
    assert (relay.round_trip_s, relay.answer, survey.hard) == (None, None, None)
    assert [one.took_s for one in survey.trials] == [None] * 4
    assert trial(survey, "relayed").why_not == "no relay answers"
    assert all(one.why_not for one in survey.trials)
