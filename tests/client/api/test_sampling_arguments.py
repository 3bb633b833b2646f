"""The sampling arguments of `generate`: what is wrong with one is told with its name, its value and what is allowed."""

import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.api.sampling import (
    MOST_PREDICTION_BYTES,
    Sampling,
    checked_params,
    checked_prediction,
    checked_speculation,
)
from molink.client.errors import InvalidRequest
from molink.shards.spec import SamplingError, SamplingParams

WHOLE = "a whole number from"
NAMES = tuple(field.name for field in fields(SamplingParams))
BIASES = "at most 300 pairs of a token id and a number from -100 to 100"


def checked(**sampling: object) -> SamplingParams:
    return checked_params(None, sampling)  # type: ignore[arg-type]


def test_the_arguments_are_the_fields_of_the_parameters() -> None:
    assert set(Sampling.__annotations__) == {
        *NAMES, "response_format", "speculation", "prediction", "shared_prompt",
    }  # fmt: skip


def test_any_sequence_will_do_and_one_stop_string_is_a_sequence_too() -> None:
    assert checked() == SamplingParams()
    assert checked(stop="END").stop == ("END",)
    assert checked(stop=None).stop == ()
    given = checked(stop=["a", "b"], stop_token_ids=range(3), logit_bias=[[5, 1.5], (6, -100)], temperature=1)
    assert (given.stop, given.stop_token_ids) == (("a", "b"), (0, 1, 2))
    assert dict(given.logit_bias) == {5: 1.5, 6: -100}


@pytest.mark.parametrize(
    ("name", "value", "allowed", "shown"),
    [
        ("max_new_tokens", "a", f"{WHOLE} 1 to 2**31 - 1", "'a'"),
        ("max_new_tokens", 0, f"{WHOLE} 1 to 2**31 - 1", "0"),
        ("max_new_tokens", 8.0, f"{WHOLE} 1 to 2**31 - 1", "8.0"),
        ("max_new_tokens", True, f"{WHOLE} 1 to 2**31 - 1", "True"),
        ("max_new_tokens", None, f"{WHOLE} 1 to 2**31 - 1", "None"),
        ("max_new_tokens", 2**31, f"{WHOLE} 1 to 2**31 - 1", "2147483648"),
        ("temperature", "hot", "a number from 0 to 100", "'hot'"),
        ("temperature", float("nan"), "a number from 0 to 100", "nan"),
        ("top_k", -1, f"{WHOLE} 0 (all) to 2**31 - 1", "-1"),
        ("top_p", 0.0, "a number above 0 and at most 1", "0.0"),
        ("top_p", 1.5, "a number above 0 and at most 1", "1.5"),
        ("seed", 2**64, f"None or {WHOLE} 0 to 2**64 - 1", "18446744073709551616"),
        ("stop", 5, "at most 16 strings, none of them empty", "5"),
        ("stop", "", "at most 16 strings, none of them empty", "('',)"),
        ("stop", ["a", 1], "at most 16 strings, none of them empty", "('a', 1)"),
        ("stop", ["a"] * 17, "at most 16 strings, none of them empty", "('a', 'a', 'a', 'a', 'a', 'a', ...)"),
        ("stop_token_ids", 5, "at most 64 token ids", "5"),
        ("stop_token_ids", "12", "at most 64 token ids", "'12'"),
        ("stop_token_ids", [-1], "at most 64 token ids", "(-1,)"),
        ("ignore_eos", "no", "True or False", "'no'"),
        ("logprobs", 21, f"None or {WHOLE} 0 to 20", "21"),
        ("logit_bias", {5: 1.0}, BIASES, "{5: 1.0}"),
        ("logit_bias", [(5, 101)], BIASES, "((5, 101),)"),
        ("logit_bias", ["ab"], BIASES, "('ab',)"),
        ("frequency_penalty", 2.5, "a number from -2 to 2", "2.5"),
        ("presence_penalty", float("nan"), "a number from -2 to 2", "nan"),
        ("repetition_penalty", 0, "a number from 0.01 to 100", "0"),
        ("min_p", 1.5, "a number from 0 to 1", "1.5"),
        ("min_tokens", 129, f"{WHOLE} 0 to max_new_tokens", "129"),
        ("min_tokens", -1, f"{WHOLE} 0 to max_new_tokens", "-1"),
    ],
)
def test_a_bad_value_is_told_with_its_name_and_what_is_allowed(
    name: str, value: object, allowed: str, shown: str
) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^{re.escape(f'{name} must be {allowed}, got {shown}')}$"
    ) as caught:
        checked(**{name: value})
    assert caught.value.parameter == name


def test_an_argument_that_does_not_exist_is_told_with_those_that_do() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^there is no max_tokens: choose from max_new_tokens, temp"
    ) as caught:
        checked(max_tokens=8)
    assert caught.value.parameter == "max_tokens"


def test_parameters_and_single_arguments_exclude_each_other() -> None:
    assert checked_params(SamplingParams(seed=3), {}) == SamplingParams(seed=3)
    with pytest.raises(InvalidRequest, match=r"^give either params or seed, not both$") as caught:
        checked_params(SamplingParams(), {"seed": 3})
    assert caught.value.parameter == "params"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(st.sampled_from(NAMES), VALUES)
def test_no_value_at_all_ends_in_another_error(name: str, value: object) -> None:
    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except SamplingError as error:
        assert error.parameter == name  # noqa: PT017 - most values are refused, but which is not asked here
    try:
        checked(**{name: value})
    except InvalidRequest as error:
        assert error.parameter == name  # noqa: PT017


def test_what_is_guessed_from_goes_with_parameters_as_a_whole() -> None:
    params = SamplingParams(seed=3)
    assert checked_params(params, {"speculation": "off", "prediction": "a"}) == params


def test_tokens_are_guessed_unless_that_is_off() -> None:
    assert [checked_speculation(one) for one in (None, "auto", "off")] == [True, True, False]
    with pytest.raises(InvalidRequest, match="speculation must be auto or off, got 'on'") as error:
        checked_speculation("on")
    assert error.value.parameter == "speculation"


def test_a_prediction_is_text_or_ids_of_at_most_64_kib() -> None:
    assert checked_prediction(None) == ()
    assert checked_prediction("é" * (MOST_PREDICTION_BYTES // 2)) == "é" * (MOST_PREDICTION_BYTES // 2)
    assert checked_prediction([1, 2]) == (1, 2)
    for wrong in ("é" * (MOST_PREDICTION_BYTES // 2 + 1), range(MOST_PREDICTION_BYTES // 4 + 1)):
        with pytest.raises(InvalidRequest, match="65536"):
            checked_prediction(wrong)
    for unknown in ({"text": "a"}, [1.5], 7):
        with pytest.raises(InvalidRequest, match="text or token ids"):
            checked_prediction(unknown)  # type: ignore[arg-type]
