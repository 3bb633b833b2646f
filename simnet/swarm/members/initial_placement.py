"""Initial placement: which layers volunteers choose, by `preview_join` asked about the peers near by.

A preview poses the problem of all peers that it is given, and takes a tenth of a second for two dozen. In a large swarm
a newcomer asks about its neighbourhood; and of newcomers to one region with the same card one in `ASKS` asks, while the
others take in turns what such volunteers chose before. The swarm that is there when the world begins has grown in the
same way: a village in each region, of which every member asks, and further volunteers who do as they did. Where
regions have too few people for a village of their own, neighbouring ones of the matrix have one together.
"""

from collections.abc import Callable, Mapping, Sequence

from molink.dht.records.records import PeerView
from molink.routing.latency.relayed_links import RelayOffer
from molink.routing.placement.placement import preview_join
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span
from molink.simnet.swarm.members.bulletin import Bulletin, Notice
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.population.volunteers import Volunteer

NEIGHBOURHOOD = 20
VILLAGE = 20
LARGE = 1000
ASKS = 8


def choose_span(
    member: Member,
    others: Sequence[PeerView],
    model: ModelSpec,
    relays: Mapping[str, RelayOffer] | None = None,
) -> Span | None:
    """What the newcomer should load, if there are only these others; `relays` as `Snapshot` has them."""
    return preview_join(Snapshot(tuple(others), model, relays=relays), member.joining()).span


def neighbours(member: Member, bulletin: Bulletin, now_s: float) -> tuple[PeerView, ...]:
    """The others about whom a newcomer asks."""
    near = bulletin.near(member.volunteer.facts, NEIGHBOURHOOD)
    return tuple(notice.view(now_s) for notice in near if notice.expires_s > now_s)


class InitialPlacement:
    """Places volunteers, and remembers what those of a region with the same card have chosen."""

    def __init__(
        self, model: ModelSpec, relays: Callable[[], Mapping[str, RelayOffer] | None] = lambda: None
    ) -> None:
        """`relays`: what those all over the swarm offer, of which neighbours know; None: only what neighbours do."""
        self.asked = 0
        """Times that `preview_join` was."""
        self._relays = relays
        self._model = model
        self._chosen: dict[tuple[int, int], list[Span]] = {}
        self._turns: dict[tuple[int, int], int] = {}
        self._newcomers: dict[str, int] = {}
        """Their turns."""

    def place_all(self, volunteers: Sequence[Volunteer]) -> list[Member]:
        """Members that hold what they have chosen, one after another, or what they are said to hold."""
        few = len(volunteers) <= 4 * NEIGHBOURHOOD
        regions = 1 + max((volunteer.region for volunteer in volunteers), default=0)
        most = 1 if few else max(1, min(regions, len(volunteers) // (2 * VILLAGE)))
        villages = [Bulletin() for _ in range(most)]
        members = []
        for volunteer in volunteers:
            member = Member(volunteer, self._model)
            village = villages[volunteer.region * most // regions]
            if volunteer.spans is not None:
                member.hold(volunteer.spans)
            elif (span := self._first_span(member, village, asks=few or len(village) < VILLAGE)) is not None:
                member.hold((span,))
            if few or len(village) < VILLAGE:
                village.put(Notice(volunteer.facts, member.state(), 0.0))
            members.append(member)
        return members

    def newcomer_span(self, member: Member, others: Sequence[PeerView], peers: int) -> Span | None:
        """What a newcomer to a swarm of so many chooses, who may be asked again; `others` are its neighbours."""
        like = self._like(member)
        if member.peer_id not in self._newcomers:
            self._newcomers[member.peer_id] = self._turns[like] = self._turns.get(like, 0) + 1
        turn = self._newcomers[member.peer_id]
        chosen = self._chosen.setdefault(like, [])
        if peers > LARGE and turn % ASKS and chosen:
            return chosen[turn % len(chosen)]
        self.asked += 1
        found = choose_span(member, others, self._model, self._relays())
        if found is not None:
            chosen.append(found)
            del chosen[:-ASKS]
        return found

    def _first_span(self, member: Member, village: Bulletin, *, asks: bool) -> Span | None:
        like = self._like(member)
        chosen = self._chosen.setdefault(like, [])
        if not asks and chosen:
            turn = self._turns[like] = self._turns.get(like, 0) + 1
            return chosen[turn % len(chosen)]
        self.asked += 1
        found = choose_span(member, neighbours(member, village, 0.0), self._model, self._relays())
        if found is not None:
            chosen.append(found)
        return found

    def _like(self, member: Member) -> tuple[int, int]:
        return member.volunteer.region, member.volunteer.kind
