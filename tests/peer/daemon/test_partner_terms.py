"""A partner that cannot be one is said in a sentence, and nobody keeps copies then."""

from dataclasses import replace

from support.circuits.circuit_cases import MODEL, peer

from molink.peer.daemon.partner_terms import PartnerTerms, partner_terms
from molink.shards.spec import Span


def test_copies_are_kept_by_anybody_by_one_or_by_nobody() -> None:
    others = [peer("other", (0, 4), free_weight_bytes=10**9)]
    assert partner_terms("auto", "me", others, MODEL, None) == PartnerTerms(keeps_copies=True)
    assert partner_terms("off", "me", others, MODEL, None) == PartnerTerms()
    assert partner_terms("other", "me", others, MODEL, Span(4, 8)) == PartnerTerms(True, "other")


def test_an_unknown_partner_oneself_and_one_too_small_are_told_apart() -> None:
    small = peer("small", (0, 4), free_weight_bytes=0)
    cases = {"me": "is this peer itself", "nobody": "no peer nobody serves", "small": "too little memory"}
    for name, reason in cases.items():
        terms = partner_terms(name, "me", [small], MODEL, Span(0, 8))
        assert reason in terms.problem
        assert replace(terms, problem="") == PartnerTerms()
    assert partner_terms("small", "me", [small], MODEL, Span(0, 4)) == PartnerTerms(True, "small")
