"""Second copies of KV caches on their way, behind what is computed.

Lines are copied from the first token on: prompts' activations go before copies, and leave them little while there are
any. From then on the peer's copies have `COPY_SHARE` of what decode leaves of its uplink. Those that have caught up get
what their sessions' tokens take, at most as much as the others, which have equal parts of the rest. That is worked out
when a copy begins or ends there, and holds until the next does. Nothing waits for a copy: it goes after everything but
weights. One whose hop is to be left goes first, and has all that decode leaves. What a partner computes of it comes no
faster than half of all its time allows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from molink.peer.memory.leases import LeaseKey
from molink.routing import PartnerChoice
from molink.routing.routes.copy_forms import WORK_SHARE, CopyCost
from molink.routing.routes.partners import COPY_SHARE, copy_bytes_per_s
from molink.shards.spec import Span
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.generation import SimulatedGeneration
from molink.simnet.swarm.sessions.step_cost import COST


@dataclass(slots=True, eq=False)
class KvCopy:
    """A copy of one hop's KV cache of one session."""

    one: SimulatedGeneration
    at: int
    """The hop's number."""
    source: str
    partner: str
    key: LeaseKey
    """Under which the partner keeps it."""
    span: Span
    tpot_ms: float
    """Of the circuit with the partner in the hop's place, as predicted."""
    cost: CopyCost
    """Its form, and what that takes of each token."""
    lines: float = 0.0
    """Tokens of which the partner has the lines."""
    lines_per_s: float = 0.0
    advanced_s: float = 0.0
    hastened: bool = False
    """Whether it is to be whole soon, since its hop is to be left."""

    @classmethod
    def of(cls, one: SimulatedGeneration, at: int, choice: PartnerChoice) -> "KvCopy | None":
        """Nothing is copied yet. None: the choice is nobody."""
        if choice.peer_id is None or choice.tpot_ms is None or choice.cost is None:
            return None
        hop = one.hops[at]
        return cls(one, at, hop.peer_id, choice.peer_id, one.key, hop.span, choice.tpot_ms, choice.cost)

    @property
    def line_bytes(self) -> int:
        """Of one token, on the wire."""
        return self.cost.token_bytes

    def advance(self, now_s: float) -> float:
        """Counts the lines since the last look, never more than were computed; returns the bytes of them."""
        self.one.advance(now_s)
        before = self.lines
        sent = self.lines + (now_s - self.advanced_s) * self.lines_per_s
        self.lines = max(before, min(float(self.one.history), sent))
        self.advanced_s = now_s
        return (self.lines - before) * self.line_bytes

    def wanted_bytes_per_s(self) -> float:
        """What would keep it up with its session, as of the last look; if it is a token or more behind, as fast as the
        partner computes, which for keys and values has no limit."""
        tpot_ms, token_ms = self.one.progress.tpot_ms, self.cost.token_ms
        if self.lines <= self.one.history - 1 or tpot_ms <= 0:
            return 1000 * WORK_SHARE * self.line_bytes / token_ms if token_ms > 0 else math.inf
        return 1000 * self.line_bytes / tpot_ms


class CopyScheduler:
    """Schedules the copies that each peer sends, and how fast."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._sent: dict[str, dict[int, KvCopy]] = {}
        """By the sender's id and the session's number: a peer has one hop of a session."""

    def begin(self, copy: KvCopy) -> None:
        """It is sent from now on, if it was not."""
        sent = self._sent.setdefault(copy.source, {})
        if sent.get(copy.one.number) is not copy:
            copy.advanced_s = self._context.now_s
            sent[copy.one.number] = copy
            self._share(copy.source)

    def hasten(self, copy: KvCopy) -> float:
        """It goes before all others from now on; returns how many tokens it lacks."""
        if not copy.hastened:
            copy.hastened = True
            self.begin(copy)
            self._share(copy.source)
        self._advance(copy)
        return copy.one.history - copy.lines

    def end(self, copy: KvCopy) -> None:
        """It is sent no longer, if it was."""
        sent = self._sent.get(copy.source, {})
        if sent.get(copy.one.number) is copy:
            self._advance(copy)
            copy.lines_per_s = 0.0
            del sent[copy.one.number]
            self._share(copy.source)

    def end_all(self, source: str) -> None:
        """Their sender is gone: what has arrived by now is all that there is."""
        for copy in self._sent.pop(source, {}).values():
            self._advance(copy)
            copy.lines_per_s = 0.0

    def _advance(self, copy: KvCopy) -> None:
        self._context.accounts.partners.copied_bytes += copy.advance(self._context.now_s)

    def _share(self, source: str) -> None:
        sent = self._sent[source]
        for copy in sent.values():
            self._advance(copy)
        uplink_mbps = self._context.members[source].volunteer.uplink_mbps or COST.unknown_bandwidth_mbps
        share = copy_bytes_per_s(uplink_mbps, self._decode_bytes_per_s(source), 1)
        hastened = [copy for copy in sent.values() if copy.hastened]
        left = _divide(hastened, share / COPY_SHARE)
        _divide([copy for copy in sent.values() if not copy.hastened], min(left, share))

    def _decode_bytes_per_s(self, source: str) -> float:
        stepping = self._context.stepping
        tpots_ms = [stepping(number).progress.tpot_ms for number in self._context.members[source].decoding]
        return sum(
            1000 * self._context.model.activation_bytes / tpot_ms for tpot_ms in tpots_ms if tpot_ms > 0
        )


def _divide(copies: Sequence[KvCopy], left: float) -> float:
    """Gives each what it wants, or an equal part of these bytes a second; returns what nobody wants."""
    for place, copy in enumerate(sorted(copies, key=KvCopy.wanted_bytes_per_s)):
        given = min(copy.wanted_bytes_per_s(), left / (len(copies) - place))
        copy.lines_per_s = given / copy.line_bytes
        left -= given
    return left
