"""What an owner leaves open is as the swarm has it; what an owner says is kept to, and its price is told."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import MODEL, facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerView, ServedModel
from molink.peer.device.thread_choice import AS_FAST
from molink.peer.models.choosing import (
    FIRST_MODEL,
    Numbers,
    agreeing,
    choose_model,
    choose_numbers,
    fastest_dtype,
    most_needed,
    warn_of_other_numbers,
)
from molink.peer.models.manifests import likeliest_contents
from molink.shards.spec import DTYPE_BYTES, QUANTIZATIONS, Span

DTYPES = sorted(DTYPE_BYTES)
NUMBERS = st.builds(Numbers, st.sampled_from(DTYPES), st.sampled_from(QUANTIZATIONS))
SAID_DTYPE = st.sampled_from(["auto", *DTYPES])
SAID_QUANTIZATION = st.sampled_from([None, *QUANTIZATIONS])


def served_in(numbers: Numbers) -> ServedModel:
    digits = f"{DTYPES.index(numbers.dtype)}{QUANTIZATIONS.index(numbers.quantization)}"
    return replace(
        MODEL, dtype=numbers.dtype, quantization=numbers.quantization, model_hash=digits * 32, layers=8
    )


def holding(numbers: Numbers, *spans: Span) -> PeerView:
    identity = Identity.generate()
    facts = replace(facts_of(identity), model=served_in(numbers), span_limit=None)
    return PeerView(facts, replace(state_of(identity), spans=spans), 0.0, b"")


@given(SAID_DTYPE, SAID_QUANTIZATION, st.lists(NUMBERS, max_size=6))
def test_what_is_said_is_kept_to_and_the_rest_is_what_most_peers_have(
    dtype: str, quantization: str | None, present: list[Numbers]
) -> None:
    chosen = choose_numbers(dtype, quantization, [served_in(one) for one in present])
    assert dtype in ("auto", chosen.dtype)
    assert quantization in (None, chosen.quantization)
    agree = [one for one in present if dtype in ("auto", one.dtype)]
    agree = [one for one in agree if quantization in (None, one.quantization)]
    if agree:
        assert agree.count(chosen) == max(map(agree.count, agree))
    else:
        assert chosen == Numbers(dtype, quantization or "none")


@given(NUMBERS, st.lists(NUMBERS, max_size=6))
def test_a_peer_is_warned_exactly_if_nobody_computes_as_it_does(own: Numbers, present: list[Numbers]) -> None:
    warning = warn_of_other_numbers("a/model", own, [served_in(one) for one in present])
    assert (warning is not None) == (bool(present) and own not in present)
    if warning is not None:
        assert all(str(one) in warning for one in present)
        assert f"adds it in {own}:" in warning


def test_the_model_in_the_numbers_with_the_most_missing_layers_is_needed_most() -> None:
    plain, small = Numbers("float32", "none"), Numbers("float32", "nf4")
    whole, most = holding(plain, Span(0, 8)), holding(small, Span(0, 6))
    assert most_needed(()) is None
    assert most_needed((whole, most)) == served_in(small)
    others = (holding(plain, Span(0, 4)), holding(small, Span(0, 6)), holding(small, Span(6, 8)))
    assert most_needed((whole, most, *others)) == served_in(plain)  # fewer peers have it


def test_what_a_single_peer_says_does_not_count_where_several_say_something_else() -> None:
    plain, small = Numbers("float32", "none"), Numbers("float32", "nf4")
    served = (holding(plain, Span(0, 8)), holding(plain, Span(0, 8)))
    assert most_needed((*served, holding(small))) == served_in(plain)


def announcing(name: str, content_hash: str) -> PeerView:
    view = holding(Numbers("float32", "none"))
    model = replace(view.facts.model, name=name, content_hash=content_hash, model_hash=content_hash)
    return replace(view, facts=replace(view.facts, model=model))


OWN = {"molink/own": "a" * 64}


def test_a_model_is_known_by_its_contents_and_never_by_the_name_that_is_announced() -> None:
    own, liar = announcing("evil/other-name", "a" * 64), announcing("molink/own", "b" * 64)
    assert choose_model((own,), OWN, "auto", None).model == "molink/own"
    assert choose_model((liar,), OWN, "auto", None).model is None
    assert choose_model((own, liar, liar, liar), OWN, "auto", None).model == "molink/own"
    assert choose_model((), OWN, "auto", None).model == FIRST_MODEL


def test_names_are_shown_if_a_hub_could_have_them_and_those_first_that_most_say() -> None:
    names = ("/etc", "../..", "a b/c", "$(id)/x", "x/y z", "a/b", "c/d", "c/d", "é/x")
    views = [announcing(name, f"{number:064x}") for number, name in enumerate(names)]
    assert choose_model(views, OWN, "auto", None).others == ("c/d", "a/b")


def test_of_what_is_served_an_owner_may_leave_out_some() -> None:
    views = [holding(Numbers("float32", "none")), holding(Numbers("bfloat16", "nf4"))]
    assert agreeing(views, "auto", None) == views
    assert agreeing(views, "auto", "nf4") == views[1:]
    assert agreeing(views, "float32", None) == views[:1]
    assert agreeing(views, "float32", "nf4") == []


@given(st.dictionaries(st.sampled_from(DTYPES), st.floats(1e-3, 1e6), min_size=1), st.sampled_from(DTYPES))
def test_the_fastest_dtype_is_the_models_own_if_that_is_as_fast(
    decode_ms: dict[str, float], own: str
) -> None:
    chosen = fastest_dtype(decode_ms, own)
    as_fast = {
        dtype for dtype, taken_ms in decode_ms.items() if taken_ms <= AS_FAST * min(decode_ms.values())
    }
    assert chosen in as_fast
    if own in as_fast:
        assert chosen == own
    else:
        assert DTYPE_BYTES[chosen] == min(DTYPE_BYTES[dtype] for dtype in as_fast)


def test_identities_without_number_in_one_network_do_not_outweigh_two_networks_or_whom_the_owner_named() -> (
    None
):
    def serving(content: str, address: str) -> PeerView:
        view = holding(Numbers("float32", "none"))
        model = replace(view.facts.model, name="some/model", content_hash=content * 64)
        return replace(view, facts=replace(view.facts, model=model, grpc_addresses=(f"{address}:4002",)))

    crowd = [serving("0", f"198.51.100.{one}") for one in range(1, 9)]
    apart = [serving("a", "192.0.2.7"), serving("a", "203.0.113.7")]
    named = serving("f", "192.0.2.9")
    other = replace(named, facts=replace(named.facts, model=replace(named.facts.model, name="another/model")))
    views = [*crowd, *apart, named]
    assert likeliest_contents([*views, other], "some/model", ()) == ["a" * 64, "0" * 64, "f" * 64]
    assert likeliest_contents(views, "some/model", (named.peer_id,)) == ["f" * 64, "a" * 64, "0" * 64]
    assert likeliest_contents(views, "no/such", ()) == []
