"""Which circuit a generation gets: the one that such generations had last, unless another is really better."""

import asyncio
from collections.abc import Sequence

from molink.client.circuit.connection import Connection
from molink.client.circuit.in_flight_load import OwnSessions
from molink.client.circuit.peer_history import Observations
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import Criteria, Route, Snapshot, Standing
from molink.routing.routes.shortlist import KnownPeers, Shortlist, keep_up_among
from molink.shards.spec import ModelSpec

THOROUGH, QUICK = "refined", "augmented"
"""How a first circuit is searched for, and how one that must stand soon, after a loss or a refusal."""
THOROUGH_S = 0.05


class Chooser:
    """Chooses circuits for one model over one connection; remembers its choices and what it saw of peers."""

    def __init__(self, connection: Connection, spec: ModelSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._observations = Observations()
        self._own = OwnSessions()
        self._standing: dict[tuple[int, int], Standing] = {}
        """By the lengths of session and prompt, as powers of two."""
        self._shortlist: Shortlist | None = None

    def lost(self, peer_id: str) -> None:
        """A peer has failed: it counts as less reliable from now on."""
        self._observations.lost(peer_id)

    def asks(self, descriptor: pb.SessionDescriptor) -> None:
        """The hops of a circuit are asked for leases: from now on they have a session more."""
        self._own.begin(*_stay(descriptor), asyncio.get_running_loop().time())

    def gives_back(self, descriptor: pb.SessionDescriptor) -> None:
        """The session has left that circuit. No error if it has before."""
        self._own.end(*_stay(descriptor), asyncio.get_running_loop().time())

    async def choose(
        self, views: Sequence[PeerView], template: pb.SessionDescriptor, avoid: frozenset[str]
    ) -> Route:
        """The route for the session that `template` describes, thoroughly searched for if it is its first.

        A search runs on a thread of its own: the tokens of other generations do not wait for it.

        Raises:
            molink.routing.NoCircuit: there is none without the peers to avoid.
        """
        peer_ids = [view.peer_id for view in views]
        now_s = asyncio.get_running_loop().time()
        self._observations.look(peer_ids, now_s)
        snapshot = Snapshot(
            self._own.added(views, now_s),
            self._spec,
            self._connection.measured_rtt_ms(),
            self._observations.of(peer_ids, self._rtt_ms),
        )
        tokens = template.capacity_tokens
        prompt_tokens = min(template.prompt_tokens, tokens)
        key = (tokens.bit_length(), prompt_tokens.bit_length())
        standing, self._shortlist = await asyncio.to_thread(
            keep_up_among,
            self._standing.get(key),
            self._shortlist,
            KnownPeers(snapshot),
            tokens,
            prompt_tokens=prompt_tokens,
            now_s=now_s,
            criteria=_criteria(avoid, first=template.epoch == 0),
        )
        self._standing[key] = standing
        return standing.route

    def _rtt_ms(self, peer_id: str) -> float | None:
        link = self._connection.links.find(peer_id)
        return None if link is None else link.rtt_ms


def _stay(descriptor: pb.SessionDescriptor) -> tuple[tuple[bytes, int], tuple[str, ...]]:
    """Which session, in which epoch, is on which peers."""
    return (descriptor.session, descriptor.epoch), tuple(hop.peer_id for hop in descriptor.hops)


def _criteria(avoid: frozenset[str], *, first: bool) -> Criteria:
    if first:
        return Criteria(avoid=avoid, algorithm=THOROUGH, time_limit_s=THOROUGH_S)
    return Criteria(avoid=avoid, algorithm=QUICK)
