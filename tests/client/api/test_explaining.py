"""An explanation shows what a circuit was charged, beside what it took, and what was assumed."""

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from support.swarms.swarm_examples import facts_of

from molink.client.api.explain import Tracer
from molink.client.api.generation import CircuitReport, Explanation, Generation, GuessCounts, Hop, HopTimes
from molink.client.commands.presentation import explanation_json, print_explanation, summary
from molink.client.epochs.session_log import SessionLog
from molink.dht.identity.identity import Identity
from molink.dht.records.records import LOOKUP, AnnouncedDraft
from molink.routing import Term
from molink.routing.cost.guesses import why_nothing
from molink.shards.spec import GUESSES

HOPS = (Hop("12D3KooWattic", 0, 1, "attic"), Hop("12D3KooWcellar", 1, 3, "cellar[red]"))
TERMS = (
    (
        Term("layers", 4.0, in_tpot=True),
        Term("transfer", 0.5, in_tpot=True),
        Term("loading", 2.0, in_tpot=False),
    ),
    (Term("layers", 8.0, in_tpot=True), Term("transfer", 0.25, in_tpot=False)),
)
ASSUMED = (("an uplink of 20 Mbps", "a round trip of 100 ms to the client"), ("an uplink of 20 Mbps",))


@pytest.fixture
def explanation() -> Explanation:
    generation = Generation("But soft", (1, 2), 3, "length", 0.5, 0.02, CircuitReport(HOPS, 12.5))
    hops = tuple(
        HopTimes(hop, 1.0, 2.0, 0.5, 3.0, 4.0, terms, assumed, ("an uplink of 95 Mbps",))
        for hop, terms, assumed in zip(HOPS, TERMS, ASSUMED, strict=True)
    )
    return Explanation(generation, hops, 12.5, 20.0, 130.0, 145.0, 12.5)


def shown(explanation: Explanation) -> str:
    out = StringIO()
    print_explanation(explanation, Console(file=out, width=120))
    return out.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """The cells of table rows by their first one."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line
    ]
    return {row[0]: row[1:] for row in cells}


def test_every_term_of_every_hop_is_shown_and_summed(explanation: Explanation) -> None:
    table = rows(shown(explanation))
    assert table["layers"] == ["4.00", "8.00", "12.00"]
    assert table["transfer"] == ["0.50", "(0.25)", "0.75"]
    assert table["loading"] == ["(2.00)", "", "2.00"]
    assert table["together"] == ["6.50", "8.25", "14.75"]
    assert explanation.objective_ms == 14.75


def test_predictions_stand_beside_measurements_and_assumptions_are_said(explanation: Explanation) -> None:
    text = shown(explanation)
    assert "A token: predicted 12.50 ms, measured 20.00 ms" in text
    assert "The first token: predicted 130.00 ms from a ready circuit, measured 145.00 ms" in text
    assert "Assumed of hops 1, 2: an uplink of 20 Mbps\n" in text
    assert "Measured of hops 1, 2: an uplink of 95 Mbps\n" in text
    assert "Assumed of hop 1: a round trip of 100 ms to the client\n" in text
    assert "cellar[red]" in text


def test_terms_and_assumptions_are_in_the_json_document(explanation: Explanation) -> None:
    document = json.loads(json.dumps(explanation_json("x", "molink/example", explanation)))
    assert document["hops"][1]["terms"][1] == {"name": "transfer", "ms": 0.25, "in_tpot": False}
    assert document["hops"][0]["assumed"] == list(ASSUMED[0])
    assert document["objective_ms"] == 14.75
    assert document["predicted_ttft_ms"] == 130.0
    assert document["measured_ttft_ms"] == 145.0
    assert document["predicted_tpot_ms"] == 12.5


def test_a_circuit_without_terms_is_shown_without_them(explanation: Explanation) -> None:
    bare = tuple(replace(times, terms=(), assumed=()) for times in explanation.hops)
    text = shown(replace(explanation, hops=bare))
    assert "Why this circuit" not in text
    assert "Assumed" not in text


def test_who_keeps_copies_is_said_in_which_form_and_how_far_behind_where_that_is_known(
    explanation: Explanation,
) -> None:
    attic, cellar = HOPS
    kept = (
        replace(attic, standby="12D3KooWshed", copy_form="token_ids"),
        replace(cellar, standby="12D3KooWbarn", copy_form="inputs", copy_behind_tokens=130),
    )
    generation = replace(explanation.generation, circuit=CircuitReport(kept, 12.5))
    said = "Copies of KV caches: of [0, 1) on KooWshed (token ids), of [1, 3) on KooWbarn (inputs, 130 tokens behind)"
    assert said in shown(replace(explanation, generation=generation))
    assert "Copies" not in shown(explanation)


def test_what_a_trip_brought_is_said_where_something_was_guessed(explanation: Explanation) -> None:
    assert "A trip" not in shown(explanation)
    ids = tuple(range(12))
    generation = replace(explanation.generation, token_ids=ids, trips=5, guessed_tokens=9, accepted_tokens=7)
    guessed = replace(explanation, generation=generation)
    assert "A trip brought 2.40 tokens, so a token took" in shown(guessed)
    assert "ms: 7 of 9 guesses were right" in shown(guessed)
    assert "A trip: predicted" in shown(guessed)
    assert "by source" not in shown(guessed)
    sources = (GuessCounts("draft", 5, 4), GuessCounts("lookup", 4, 3))
    by_source = replace(guessed, guess_sources=sources)
    assert "Guesses that were right, by source: draft 4 of 5, lookup 3 of 4\n" in shown(by_source)
    said: Any = explanation_json("x", "molink/example", by_source)["guess_sources"]
    assert said[0] == {"source": "draft", "guessed_tokens": 5, "accepted_tokens": 4}
    assert explanation_json("x", "molink/example", guessed)["tokens_per_trip"] == 2.4
    assert "12 tokens in 5 trips over 2 hops" in summary(generation)


def test_why_nothing_was_guessed_is_said_where_nothing_was(explanation: Explanation) -> None:
    assert "Nothing was guessed" not in shown(explanation)
    why = replace(explanation, why_no_guesses="attic[red] takes no guesses")
    assert "Nothing was guessed: attic[red] takes no guesses\n" in shown(why)
    assert explanation_json("x", "molink/example", why)["why_no_guesses"] == why.why_no_guesses


def test_the_reason_is_a_hop_that_takes_none_a_head_that_makes_none_or_that_none_paid() -> None:
    facts = facts_of(Identity.generate())
    able = replace(facts, sampling_abilities=(GUESSES,), drafts=(AnnouncedDraft(LOOKUP),))
    assert why_nothing([able, replace(able, drafts=())]) == ""
    assert why_nothing([replace(able, drafts=(), name="attic"), able]) == "the head, attic, guesses nothing"
    assert (
        why_nothing([able, replace(able, sampling_abilities=(), name="cellar")]) == "cellar takes no guesses"
    )
    generation, log = Generation("a", (1, 2), 3, "length", 0.5, 0.02, CircuitReport(HOPS, 12.5)), SessionLog()
    told = [
        Tracer().explain(one, log, speculates=speculates).why_no_guesses
        for one, speculates in (
            (generation, False),
            (generation, True),
            (replace(generation, guessed_tokens=2), True),
        )
    ]
    assert told == ["speculation is off", "none was expected to save time", ""]
    log.no_guesses = "cellar takes no guesses"
    assert Tracer().explain(generation, log, speculates=True).why_no_guesses == log.no_guesses
