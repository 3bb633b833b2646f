"""Which layers volunteers hold: `preview_join`, asked about the peers near by.

A preview poses the problem of all peers that it is given, and takes a tenth of a second for two dozen. In a large swarm
a newcomer asks about its neighbourhood; and of newcomers to one region with the same card one in `ASKS` asks, while the
others take in turns what such volunteers chose before. The swarm that is there when the world begins has grown in the
same way: a village in each region, of which every member asks, and further volunteers who do as they did. Where
regions have too few people for a village of their own, neighbouring ones of the matrix have one together.
"""

from collections.abc import Sequence

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
    member: Member, bulletin: Bulletin, model: ModelSpec, now_s: float
) -> tuple[Span | None, float]:
    """What the newcomer should load, and the seconds until it serves that."""
    near = bulletin.near(member.volunteer.facts, NEIGHBOURHOOD)
    preview = preview_join(Snapshot(tuple(notice.view(now_s) for notice in near), model), member.joining())
    return preview.span, preview.ready_s


class Settling:
    """Remembers what volunteers of a region with the same card have chosen."""

    def __init__(self, model: ModelSpec) -> None:
        self.asked = 0
        """Times that `preview_join` was."""
        self._model = model
        self._chosen: dict[tuple[int, int], list[Span]] = {}
        self._turns: dict[tuple[int, int], int] = {}

    def settle(self, volunteers: Sequence[Volunteer]) -> list[Member]:
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

    def newcomer_span(self, member: Member, bulletin: Bulletin, now_s: float) -> tuple[Span | None, float]:
        """What a newcomer to the swarm of `bulletin` loads, and the seconds until it serves that."""
        like = self._like(member)
        turn = self._turns[like] = self._turns.get(like, 0) + 1
        chosen = self._chosen.setdefault(like, [])
        if len(bulletin) > LARGE and turn % ASKS and chosen:
            span = chosen[turn % len(chosen)]
            size_bytes = self._model.weight_bytes(span)
            fetch = member.volunteer.fetch_bytes_per_s
            return span, member.load_s((span,)) + (size_bytes / fetch if fetch else 0.0)
        self.asked += 1
        found, ready_s = choose_span(member, bulletin, self._model, now_s)
        if found is not None:
            chosen.append(found)
            del chosen[:-ASKS]
        return found, ready_s

    def _first_span(self, member: Member, village: Bulletin, *, asks: bool) -> Span | None:
        like = self._like(member)
        chosen = self._chosen.setdefault(like, [])
        if not asks and chosen:
            turn = self._turns[like] = self._turns.get(like, 0) + 1
            return chosen[turn % len(chosen)]
        self.asked += 1
        found, _ = choose_span(member, village, self._model, 0.0)
        if found is not None:
            chosen.append(found)
        return found

    def _like(self, member: Member) -> tuple[int, int]:
        return member.volunteer.region, member.volunteer.kind
