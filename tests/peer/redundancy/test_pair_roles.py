"""Who of two holders decodes what: what must hold, whatever either does."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.redundancy.pair_balance import HeldSequence
from molink.peer.redundancy.pair_roles import (
    HERE,
    THERE,
    WORTH_TOKENS,
    HolderLoad,
    RoleCosts,
    Roles,
    going_over,
    is_worth_copying,
)

LOADS = st.builds(
    HolderLoad,
    st.lists(st.integers(1, 500), max_size=8).map(tuple),
    st.sampled_from([0, 0, WORTH_TOKENS - 1, WORTH_TOKENS, 1000]),
)
FLAT = RoleCosts(lambda _: 0.02, prompt_s=1.0, move_s=0.03)
"""A step takes as long for many sessions as for one."""
STEEP = RoleCosts(lambda rows: 0.02 * rows, prompt_s=1.0, move_s=0.03)


def sequences(load: HolderLoad) -> list[HeldSequence]:
    return [
        HeldSequence(at, tokens, 600, HERE, (HERE, THERE)) for at, tokens in enumerate(load.decoding_tokens)
    ]


def goes(
    here: HolderLoad, there: HolderLoad, roles: Roles = Roles.PAIRS, costs: RoleCosts | None = FLAT
) -> tuple[int, ...]:
    return going_over(roles, here, there, sequences(here), costs, is_quiet=True)


@given(LOADS, LOADS, st.sampled_from([Roles.OFF, Roles.PIECES]))
def test_without_pairs_nothing_goes_over(here: HolderLoad, there: HolderLoad, roles: Roles) -> None:
    assert goes(here, there, roles) == ()


@given(LOADS, LOADS)
def test_nothing_goes_to_a_holder_that_computes_prompts(here: HolderLoad, there: HolderLoad) -> None:
    if there.prompt_tokens:
        assert goes(here, there) == ()


@given(LOADS, LOADS)
def test_all_that_is_decoded_beside_a_prompt_goes_to_a_holder_without_one(
    here: HolderLoad, there: HolderLoad
) -> None:
    if here.prompt_tokens >= WORTH_TOKENS and not there.prompt_tokens:
        assert goes(here, there) == tuple(range(len(here.decoding_tokens)))


@given(LOADS, LOADS)
def test_balance_is_reached_by_one_holder_and_undone_by_none(here: HolderLoad, there: HolderLoad) -> None:
    here, there = HolderLoad(here.decoding_tokens), HolderLoad(there.decoding_tokens)
    going = goes(here, there)
    left = [tokens for at, tokens in enumerate(here.decoding_tokens) if at not in going]
    came = [*there.decoding_tokens, *(here.decoding_tokens[at] for at in going)]
    if len(here.decoding_tokens) > len(there.decoding_tokens):
        assert 0 <= len(left) - len(came) <= 1
    else:
        assert going == ()
    assert goes(HolderLoad(tuple(left)), HolderLoad(tuple(came))) == ()
    if going:
        assert goes(HolderLoad(tuple(came)), HolderLoad(tuple(left))) == ()


def test_a_session_of_which_little_is_left_stays_where_it_is() -> None:
    held = [HeldSequence(at, 500, 500 + left, HERE, (HERE, THERE)) for at, left in enumerate((8, 31, 32))]
    prompted = HolderLoad((500, 500, 500), 1000)
    assert going_over(Roles.PAIRS, prompted, HolderLoad(), held, FLAT, is_quiet=False) == (2,)


@given(st.integers(1, 500), st.integers(0, 100))
def test_a_session_that_may_never_go_over_is_not_worth_copying(prompt_tokens: int, new_tokens: int) -> None:
    most_tokens = prompt_tokens + new_tokens
    held = [HeldSequence(0, prompt_tokens, most_tokens, HERE, (HERE, THERE))]
    prompted = HolderLoad((prompt_tokens,), 1000)
    going = going_over(Roles.PAIRS, prompted, HolderLoad(), held, FLAT, is_quiet=False)
    assert bool(going) is is_worth_copying(prompt_tokens, most_tokens)


def test_after_a_prompt_sessions_stay_until_it_is_quiet() -> None:
    here = HolderLoad((100, 100, 100, 100))
    assert going_over(Roles.PAIRS, here, HolderLoad(), sequences(here), FLAT, is_quiet=False) == ()


def test_a_session_on_its_way_counts_as_there() -> None:
    here = HolderLoad((100, 100))
    held = sequences(here)
    under_way = HeldSequence(1, 100, 600, THERE, (HERE, THERE))
    assert going_over(Roles.PAIRS, here, HolderLoad(), [held[0], under_way], FLAT, is_quiet=True) == ()


def test_who_chooses_for_itself_takes_pairs_where_decode_loses_less_by_them() -> None:
    prompted, partner = HolderLoad((100, 100), 1000), HolderLoad((100,))
    assert goes(prompted, partner, Roles.AUTO, FLAT) == (0, 1)
    assert goes(prompted, partner, Roles.AUTO, STEEP) == (0, 1)
    assert goes(prompted, HolderLoad((100,) * 6), Roles.AUTO, STEEP) == ()
    assert goes(prompted, partner, Roles.AUTO, None) == ()
    slow_line = RoleCosts(FLAT.decode_s, FLAT.prompt_s, move_s=0.5)
    assert goes(prompted, partner, Roles.AUTO, slow_line) == ()
    computed = RoleCosts(FLAT.decode_s, FLAT.prompt_s, FLAT.move_s, is_computed_twice=True)
    assert goes(prompted, partner, Roles.AUTO, computed) == ()


def test_who_chooses_for_itself_balances_where_steps_become_shorter_by_it() -> None:
    four = HolderLoad((100, 100, 100, 100))
    assert len(goes(four, HolderLoad(), Roles.AUTO, STEEP)) == 2
    assert goes(four, HolderLoad(), Roles.AUTO, FLAT) == ()
    assert goes(four, HolderLoad(), Roles.AUTO, None) == ()
