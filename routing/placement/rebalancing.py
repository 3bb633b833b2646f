"""Rebalancing: whether a peer should hold other layers than it does, one peer at a time, and only if it pays."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from molink.dht.records.records import PeerView
from molink.routing.arrays import BoolArray
from molink.routing.cost.cost import CostModel
from molink.routing.placement.coverage import (
    BestCircuit,
    Placement,
    layer_table,
    spans_of,
    thinness,
    weight_bytes,
)
from molink.routing.placement.placement import SESSION_TOKENS
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span

LOOK_EVERY_S = (2.0, 5.0)
"""Between a peer's looks at whether to move, drawn anew each time: those that see the same hole see it one after
another."""
SETTLE_S = 1.0
"""Within this time what a peer says has reached the others, as a rule: so long it waits before it does it."""
_SEARCHED = 3
"""Placements whose TPOT is worked out because they give most capacity."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class MovePolicy:
    """Policy of moves: when one is worth it. All are positive."""

    min_hold_s: float = 1800.0
    """What a peer holds it holds for at least so long."""
    horizon_s: float = 3600.0
    """The time within which a move must have paid for itself: volunteers stay for an evening."""
    min_gain: float = 0.1
    """Part of the present rate that must be gained over the horizon beyond the cost: hysteresis."""
    turn_s: float = 60.0
    """How long a peer's turn to move lasts."""
    peers_per_turn: int = 20
    """One peer in so many has its turn at the same time: what several do at once they do blindly."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{each.name} must be finite and above 0, got {value}")


AT_ONCE = MovePolicy(min_hold_s=1.0, turn_s=1.0, peers_per_turn=1)
"""For a swarm that can serve nobody: everybody may move. Who says first that it will is left to it."""
SETTLED = MovePolicy()


@dataclass(frozen=True, slots=True)
class Move:
    """Layers to drop, then layers to load. What is neither stays as it is."""

    load: tuple[Span, ...]
    drop: tuple[Span, ...]
    load_bytes: int
    load_s: float
    tpot_before_ms: float | None
    tpot_after_ms: float | None
    tokens_per_s_before: float
    tokens_per_s_after: float


@dataclass(frozen=True, slots=True, eq=False)
class _Option:
    table: BoolArray
    """[layers]: what the peer would hold."""
    load_s: float
    rates: tuple[float, float, float]
    """Tokens per second of the thinnest layer before, while loading, and after."""
    covered: tuple[int, int]
    """Layers that somebody holds, before and after."""


def next_move(
    snapshot: Snapshot,
    peer_id: str,
    held_s: float,
    now_s: float,
    leased: tuple[Span, ...],
) -> Move | None:
    """`propose_move` at once if nobody holds some layer, and either the swarm can serve nobody because of that, or the
    peer has memory and no layers; else as SETTLED says.

    `held_s`: how long the peer has held what it holds, by a clock that is never set back. `now_s`: the time of day,
    which says only whose turn it is.
    """
    if held_s < AT_ONCE.min_hold_s:
        return None
    views = snapshot.usable()
    is_idle = _is_idle(views, peer_id)
    if is_stuck(views, snapshot.model) and (is_idle or _may_fill(views, snapshot.model, peer_id)):
        move = _proposed(snapshot, views, peer_id, now_s, AT_ONCE, leased)
        if move is not None and (is_idle or move.tpot_before_ms is None):
            return move
    return (
        _proposed(snapshot, views, peer_id, now_s, SETTLED, leased) if held_s >= SETTLED.min_hold_s else None
    )


def without_late_claims(
    views: Iterable[PeerView], seen: Iterable[PeerView], peer_id: str
) -> tuple[PeerView, ...]:
    """`views` as a peer sees them that has said what it will load, and had `seen` those before when it decided.

    Of claims that crossed its own, those of peers of greater id do not count: they see its own, and give way.
    """
    known = {(view.peer_id, view.state.loading) for view in seen}
    return tuple(
        replace(view, state=replace(view.state, loading=()))
        if view.peer_id > peer_id and (view.peer_id, view.state.loading) not in known
        else view
        for view in views
    )


def propose_move(
    snapshot: Snapshot,
    peer_id: str,
    held_since_s: float,
    now_s: float,
    policy: MovePolicy = MovePolicy(),
    *,
    leased: tuple[Span, ...] | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> Move | None:
    """Proposes what the peer should hold instead; None: what it does.

    `now_s` and `held_since_s` are of one clock, best one that peers share roughly, such as the time of day: turns
    follow it. `leased`: layers with a lease; None: unknown, so any session pins all layers. Layers are dropped only
    if memory needs it, and never if they are leased or if no other peer of a smaller id holds them: peers that
    decide at the same moment on the same snapshot cannot all drop a layer.

    A move must worsen neither the TPOT of the best circuit nor the capacity of the thinnest layer, and improve one
    of the two by so much that, loading and lost capacity meanwhile paid, `min_gain` is left over the horizon. Or it
    makes a circuit possible or covers more layers. Each move so raises one measure by a tenth and lowers none:
    an unchanging swarm comes to rest.
    """
    if now_s - held_since_s < policy.min_hold_s:
        return None
    return _proposed(snapshot, snapshot.usable(), peer_id, now_s, policy, leased, cost)


def is_stuck(views: Iterable[PeerView], model: ModelSpec) -> bool:
    """Whether there is a layer that nobody holds or loads."""
    promised = np.zeros(model.layers, dtype=np.bool_)
    for view in views:
        for span in (*view.state.spans, *view.state.loading):
            promised[span.start : span.stop] = True
        if promised.all():
            return False
    return True


def having_turn(peer_ids: Iterable[str], now_s: float, policy: MovePolicy = SETTLED) -> list[str]:
    """The peers that may move now: the first by a hash that differs with every turn."""
    turn = math.floor(now_s / policy.turn_s)
    order = sorted((hashlib.sha256(f"{turn}/{one}".encode()).digest(), one) for one in peer_ids)
    return [one for _, one in order[: math.ceil(len(order) / policy.peers_per_turn)]]


def _proposed(
    snapshot: Snapshot,
    views: tuple[PeerView, ...],
    peer_id: str,
    now_s: float,
    policy: MovePolicy,
    leased: tuple[Span, ...] | None,
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> Move | None:
    """As `propose_move`, of a peer that has held long enough; `views` are the usable ones.

    What takes least time to find out goes first: searches for circuits take nearly all of it.
    """
    view = next((one for one in views if one.peer_id == peer_id), None)
    if view is None or peer_id not in having_turn((one.peer_id for one in views), now_s, policy):
        return None
    model = snapshot.model
    placement = Placement.of(snapshot, view, min(SESSION_TOKENS, model.context_length), cost, views)
    held = layer_table(model.layers, view.state.spans)
    kept = held & _pinned(views, model, view, leased)
    options = _options(placement, held, kept)
    if not options:
        return None
    # Whatever it comes to hold, no circuit is better than this one; and one that does without the peer stays as it is.
    ideal = placement.holding(kept)
    needless = ideal is not None and ideal.own_hop is None
    before = ideal if needless else placement.holding(held)
    for option in _shortlist(options, ideal):
        if not _pays(option, before, ideal, policy):
            continue
        after = ideal if needless else placement.holding(option.table)
        if _pays(option, before, after, policy):
            return _move(placement, held, option, before, after)
    return None


def _is_idle(views: tuple[PeerView, ...], peer_id: str) -> bool:
    """Whether the peer has memory and holds no layer, as after a load that failed. Circuits may have it load some, but
    whoever asks first waits for that."""
    return any(
        view.peer_id == peer_id and not view.state.spans and view.state.free_weight_bytes > 0
        for view in views
    )


def _may_fill(views: tuple[PeerView, ...], model: ModelSpec, peer_id: str) -> bool:
    """Whether the peer holds a layer that it might drop: another one of a smaller id holds it too."""
    own = [span for view in views if view.peer_id == peer_id for span in view.state.spans]
    before = [span for view in views if view.peer_id < peer_id for span in view.state.spans]
    return bool((layer_table(model.layers, own) & layer_table(model.layers, before)).any())


def _pinned(
    views: tuple[PeerView, ...], model: ModelSpec, view: PeerView, leased: tuple[Span, ...] | None
) -> BoolArray:
    """[layers]: what must not be dropped. What another peer is only loading is not held elsewhere: it may fail."""
    if leased is None:
        leased = (model.whole,) if view.state.sessions > 0 else ()
    elsewhere = [span for one in views if one.peer_id < view.peer_id for span in one.state.spans]
    return layer_table(model.layers, leased) | ~layer_table(model.layers, elsewhere)


def _options(placement: Placement, held: BoolArray, kept: BoolArray) -> list[_Option]:
    """Every span that would be new, with what it displaces, and its capacity; the best off thin layers first."""
    model = placement.model
    rates = placement.rates(held)
    options: dict[bytes, _Option] = {}
    for span in placement.candidates(kept):
        wanted = layer_table(model.layers, (span,))
        table = wanted | held
        if weight_bytes(model, table) > placement.total_bytes:
            table = wanted | kept
        if not (table & ~held).any():
            continue
        load_s = _load_bytes(placement, table, held) / max(1.0, placement.view.facts.load_bytes_per_s)
        after, meanwhile = placement.rates(table), placement.rates(table & held)
        options[table.tobytes()] = _Option(
            table,
            load_s,
            (float(rates.min()), float(meanwhile.min()), float(after.min())),
            (int((rates > 0).sum()), int((after > 0).sum())),
        )
    return sorted(options.values(), key=lambda one: thinness(placement.rates(one.table)), reverse=True)


def _shortlist(options: list[_Option], ideal: BestCircuit | None) -> list[_Option]:
    """Options worth a search: those of most capacity, and those that suit the best circuit there could be."""
    chosen = options[:_SEARCHED]
    if ideal is not None and ideal.own_hop is not None:
        hop = ideal.own_hop
        suiting = [one for one in options[_SEARCHED:] if one.table[hop.start : hop.stop].all()]
        chosen += suiting[:1]
    return chosen


def _pays(option: _Option, before: BestCircuit | None, after: BestCircuit | None, policy: MovePolicy) -> bool:
    if option.load_s >= policy.horizon_s or option.covered[1] < option.covered[0]:
        return False
    if before is None:
        return after is not None or option.covered[1] > option.covered[0]
    old, meanwhile, new = option.rates
    if after is None or after.tpot_ms > before.tpot_ms * (1 + _ROUNDING) or new < old * (1 - _ROUNDING):
        return False
    if option.covered[1] > option.covered[0]:
        return True
    quickened = (1.0 / max(before.tpot_ms, _ROUNDING), 0.0, 1.0 / max(after.tpot_ms, _ROUNDING))
    return any(_gains(*rates, option.load_s, policy) for rates in ((old, meanwhile, new), quickened))


def _gains(before: float, meanwhile: float, after: float, load_s: float, policy: MovePolicy) -> bool:
    """Whether more comes of the horizon, the loading included, than it would have, by `min_gain`."""
    made = meanwhile * load_s + after * (policy.horizon_s - load_s)
    return after > before and made >= before * policy.horizon_s * (1 + policy.min_gain)


def _load_bytes(placement: Placement, table: BoolArray, held: BoolArray) -> int:
    return weight_bytes(placement.model, table) - weight_bytes(placement.model, table & held)


def _move(
    placement: Placement,
    held: BoolArray,
    option: _Option,
    before: BestCircuit | None,
    after: BestCircuit | None,
) -> Move:
    return Move(
        load=spans_of(option.table & ~held),
        drop=spans_of(held & ~option.table),
        load_bytes=_load_bytes(placement, option.table, held),
        load_s=option.load_s,
        tpot_before_ms=None if before is None else before.tpot_ms,
        tpot_after_ms=None if after is None else after.tpot_ms,
        tokens_per_s_before=option.rates[0],
        tokens_per_s_after=option.rates[2],
    )
