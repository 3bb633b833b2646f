"""What simulated swarms announce: `python tests/bench/simnet/simnet_announcements.py --peers N --hours H --churn H`.

As `molink-simnet swarm`, with placement left out (everybody holds the same span), and sessions reduced to what they
announce: one a second changes seven of the peers that are asked most, when it begins and when it ends.
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from unittest import mock

from molink.dht.records.records import PeerState
from molink.shards.spec import Span
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.traces import bundled_trace
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.swarm import world
from molink.simnet.swarm.factory import random_setup
from molink.simnet.swarm.members import initial_placement
from molink.simnet.swarm.members.announcing import AnnouncementDriver
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.report import swarm_row
from molink.simnet.swarm.settings import HOUR_S, Churn, SwarmSettings

HOPS, SESSION_S, MOST_ASKED = 7, 40.0, 256
STATE = Member.state


@dataclass(slots=True)
class Sessions:
    """How many each peer has, and when that changes."""

    swarm: world.SwarmWorld
    chance: random.Random = field(default_factory=lambda: random.Random(3))
    count: Counter[str] = field(default_factory=Counter)
    announcing: list[AnnouncementDriver] = field(default_factory=list)

    def made(self, *parts: object) -> AnnouncementDriver:
        """The world's announcing, remembered."""
        self.announcing.append(AnnouncementDriver(*parts))  # type: ignore[arg-type]
        return self.announcing[-1]

    def state(self, member: Member) -> PeerState:
        """What the member would announce, sessions included."""
        return replace(STATE(member), sessions=self.count[member.peer_id])

    def begin(self) -> None:
        """One comes, and the next one a second later on average."""
        members = list(self.swarm.members.values())
        asked = members[: max(8, min(MOST_ASKED, len(members) // 4))]
        for member in self.chance.sample(asked, min(HOPS, len(asked))):
            self._change(member, 1)
            self.swarm.timeline.call(
                self.chance.expovariate(1 / SESSION_S), lambda member=member: self._change(member, -1)
            )
        self.swarm.timeline.call(self.chance.expovariate(1.0), self.begin)

    def _change(self, member: Member, by: int) -> None:
        self.count[member.peer_id] += by
        if member.alive:
            self.announcing[0].changed(member)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=0.1)
    parser.add_argument("--churn", type=float, default=2.0, help="hours that a volunteer stays; 0: for ever")
    arguments = parser.parse_args()
    churn = Churn(arguments.churn * HOUR_S) if arguments.churn else Churn()
    settings = SwarmSettings(arguments.peers, arguments.hours * HOUR_S, rate_rps=1e-4, churn=churn)
    with mock.patch.object(initial_placement, "choose_span", return_value=Span(0, 3)):
        cast = random_setup(settings, MODEL_SHAPES["llama-2-70b"], bundled_matrix(), bundled_trace())
        swarm = world.SwarmWorld(cast, settings)
        sessions = Sessions(swarm)
        swarm.timeline.call(1.0, sessions.begin)
        with (
            mock.patch.object(world, "Announcing", sessions.made),
            mock.patch.object(Member, "state", lambda member: sessions.state(member)),  # noqa: PLW0108 (a method)
        ):
            swarm.run()
    row = swarm_row(swarm, "swarm")
    print(
        f"{row.peers} peers: {row.traffic_kbit_s:.1f} kbit/s, busiest minute {row.busiest_minute_kbit_s:.1f}"
    )
    for kind, kbit_s in row.traffic_by_kind_kbit_s.items():
        print(f"  {kind:<10} {kbit_s:.2f}")
    print(f"  gone and in the tables: {row.announced_at_end - row.peers_at_end}")


if __name__ == "__main__":
    main()
