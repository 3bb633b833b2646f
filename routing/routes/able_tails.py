"""Which peers can be the tail of a session's circuit, where that has to be able to draw in some way. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from molink.dht.records.records import PeerView
from molink.routing.problem.circuit import NoCircuit
from molink.shards.spec import GRAMMARS, PENALTIES, PROMPT_LOGPROBS, Span

_WHAT: Final = {
    PENALTIES: "draws with penalties, min_p or min_tokens: those that do not are of an older version",
    GRAMMARS: "draws by a grammar: that takes the extra molink[grammars] there",
    PROMPT_LOGPROBS: "tells log-probabilities of prompts: those that do not are older, or have several devices",
}


def with_able_tails(views: Sequence[PeerView], ability: str) -> tuple[PeerView, ...]:
    """The peers as they are for a session that needs a tail of that ability: those without it neither hold nor take the
    model's last layer. An empty ability is everybody's."""
    if not ability:
        return tuple(views)
    able = (
        _as_before_the_tail(view) if ability not in view.facts.sampling_abilities else view for view in views
    )
    return tuple(view for view in able if view is not None)


def lacking_ability(cause: NoCircuit, views: Sequence[PeerView], ability: str) -> NoCircuit:
    """The reason why there is no circuit, with what is missing where that is a tail of that ability."""
    if not ability or any(ability in view.facts.sampling_abilities for view in views):
        return cause
    detail = f"no peer that is known {_WHAT.get(ability, f'has {ability}')}; {cause.detail}"
    return NoCircuit(detail, cause.missing_layers, cause.missing_bytes)


def _as_before_the_tail(view: PeerView) -> PeerView | None:
    """The peer without the model's last layer; None: nothing is left of it."""
    last = view.facts.model.layers - 1
    limit = view.facts.span_limit or Span(0, last + 1)
    if limit.start >= last:
        return None
    spans = tuple(Span(one.start, min(one.stop, last)) for one in view.state.spans if one.start < last)
    return replace(
        view,
        facts=replace(view.facts, span_limit=Span(limit.start, min(limit.stop, last))),
        state=replace(view.state, spans=spans),
    )
