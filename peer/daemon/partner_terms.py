"""Whether a peer keeps second copies of KV caches, and who may keep its own: what its owner says, checked. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.dht.records.records import PeerView
from molink.shards.spec import ModelSpec, Span, missing_spans


@dataclass(frozen=True, slots=True)
class PartnerTerms:
    """A peer's part in second copies, as it announces it."""

    keeps_copies: bool = False
    partner_peer_id: str = ""
    """The only peer that may keep its own; empty: any."""
    problem: str = ""
    """Why there are no copies though the owner wants some, in a sentence."""


def partner_terms(
    option: str, own_peer_id: str, others: Sequence[PeerView], spec: ModelSpec, layers: Span | None
) -> PartnerTerms:
    """What `--partner` means, `others` being the model's peers that are known now, and `layers` those that this peer
    holds from the start, if its owner says so.

    A partner by name has to be somebody else, known, with room for the layers: else nobody keeps copies.
    """
    if option in ("auto", "off"):
        return PartnerTerms(keeps_copies=option == "auto")
    if option == own_peer_id:
        return PartnerTerms(
            problem=f"--partner {option} is this peer itself: no copies are kept. Name another"
        )
    view = next((other for other in others if other.peer_id == option), None)
    if view is None:
        why = f"no peer {option} serves {spec.name} that is known now"
        return PartnerTerms(problem=f"--partner: {why}, and no copies are kept. Start it first, or use auto")
    missing_bytes = sum(map(spec.weight_bytes, missing_spans(layers, view.state.spans))) if layers else 0
    if missing_bytes > view.state.free_weight_bytes:
        why = f"{view.facts.name} has too little memory for layers {layers}"
        return PartnerTerms(problem=f"--partner: {why}, and no copies are kept. Name another, or use auto")
    return PartnerTerms(True, option)
