"""Copy forms: in what a second copy of a KV cache travels, what that takes on the wire and at who keeps it. Pure.

Keys and values are written as they come. A hop's inputs, and a head's token ids, are fewer bytes, and the partner
computes its own keys and values from them in its idle moments: with grouped heads a row of activations is as long as
the keys and values of a few layers, without them as those of half a layer.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

from molink.dht.records.records import PeerView
from molink.routing.cost.cost import CostModel, prefill_layer_ms
from molink.routing.cost.terms import utilisation
from molink.shards.spec import ModelSpec, Span, row_bytes

TOKEN_ID_BYTES = 4
GATHERED_TOKENS = 64
"""Tokens of a copy that its partner computes in one step, where so many come within GATHER_S."""
GATHER_S = 1.0
MOST_WORK = 4.0
"""A copy is computed in idle moments, and spares a user a wait: so it may be more work than what is left to do."""
WORK_SHARE = 0.5
"""Of a partner's idle time, the part that the computing of one copy may count on."""


class CopyForm(IntEnum):
    """Form of a copy; the numbers are those of the protocol."""

    KEYS_AND_VALUES = 0
    """As the hop's KV cache has them."""
    INPUTS = 1
    """The hop's incoming rows, as they were encoded on the wire."""
    TOKEN_IDS = 2
    """Of a head: the sequence itself."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of a copy in one form."""

    form: CopyForm
    token_bytes: int
    """On the wire, of each token."""
    token_ms: float = 0.0
    """Of the partner's device, for each token."""


def computed_form(span: Span) -> CopyForm:
    """Returns the form from which a partner of that hop computes."""
    return CopyForm.TOKEN_IDS if span.start == 0 else CopyForm.INPUTS


def may_be_copied_as(form: CopyForm, model: ModelSpec, span: Span) -> bool:
    """Whether a copy of the span can be of that form. Each token changes all of the states that layers keep: sent
    as keys and values are, they would be sent whole again and again, so that copies of such layers are computed."""
    has_states = any(model.state_bytes[span.start : span.stop])
    return form == computed_form(span) or (form == CopyForm.KEYS_AND_VALUES and not has_states)


def form_of(number: int, model: ModelSpec, span: Span) -> CopyForm | None:
    """Returns the form that the protocol numbers so; None: a copy of the span is in no such form."""
    found = next((form for form in CopyForm if form.value == number), None)
    return found if found is not None and may_be_copied_as(found, model, span) else None


def copied_bytes_per_token(model: ModelSpec, span: Span, form: CopyForm, encoding: str) -> int:
    """Returns what a copy of the span takes on the wire for each token; `encoding` is that in which rows come in.

    Raises:
        ValueError: a copy of the span cannot be of that form.
    """
    if not may_be_copied_as(form, model, span):
        raise ValueError(f"layers {span} are not copied as {form.name.lower()}")
    if form == CopyForm.TOKEN_IDS:
        return TOKEN_ID_BYTES
    if form == CopyForm.INPUTS:
        return row_bytes(encoding, model.hidden_size)
    return sum(model.kv_bytes_per_token[span.start : span.stop])


def copy_costs(model: ModelSpec, span: Span, encoding: str) -> tuple[CopyCost, ...]:
    """Returns what each form of a copy of the span takes on the wire: that of the fewest bytes first, and of two with
    as many the one that is not computed."""
    forms = (form for form in CopyForm if may_be_copied_as(form, model, span))
    costs = (CopyCost(form, copied_bytes_per_token(model, span, form, encoding)) for form in forms)
    return tuple(sorted(costs, key=lambda one: (one.token_bytes, one.form)))


def computing_ms(
    view: PeerView,
    span: Span,
    tokens_per_s: float,
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> float:
    """Returns what a peer takes for each token of a copy that it computes, as many at a time as come in GATHER_S."""
    rows = max(1, min(GATHERED_TOKENS, int(min(tokens_per_s, GATHERED_TOKENS) * GATHER_S)))
    facts = view.facts
    layer_ms = prefill_layer_ms(facts.layer_latencies, rows, cost, facts.prefill_latencies)
    return (facts.step_ms + len(span) * layer_ms + (facts.embed_ms if span.start == 0 else 0.0)) / rows


def pays(
    view: PeerView,
    span: Span,
    prompt_tokens: int,
    left_ms: float,
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> bool:
    """Whether a copy is not far more work than what it is for: a peer that computes its prompt takes no longer than
    MOST_WORK times what the hop takes for all tokens that may still be generated, `left_ms`. Else a loss, which is
    rare, costs less than the copy."""
    return prompt_tokens * computing_ms(view, span, math.inf, cost) <= MOST_WORK * left_ms


def can_compute(view: PeerView, token_ms: float, tpot_ms: float) -> bool:
    """Whether a peer has idle time for a copy that takes it so long for each token, one token each `tpot_ms`: its own
    sessions step once in so long, too, and go first."""
    idle = 1.0 - utilisation(view, tpot_ms)
    return math.isfinite(token_ms) and token_ms <= WORK_SHARE * idle * tpot_ms
