"""Traces of requests: the bundled one, files of the user's own, and one sentence for what is none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.simnet.core.traces import (
    AZURE_HEADER,
    HEADER,
    TraceError,
    TraceRequest,
    bundled_trace,
    parse_trace,
    read_trace,
)

FIRST = ",".join(HEADER)
AZURE = ",".join(AZURE_HEADER)


def test_the_bundled_trace_is_azure_s_conversations() -> None:
    trace = bundled_trace()
    assert len(trace) == 19_366
    assert trace[0] == TraceRequest(0.0, 374, 44)
    assert trace[-1].arrival_s == pytest.approx(3502, abs=1)
    within = [one for one in trace if one.prompt_tokens <= 2048 and one.generated_tokens <= 1024]
    assert len(within) == 16_663


def test_azure_s_own_format_gives_seconds_since_the_first_request() -> None:
    text = f"{AZURE}\n2023-11-16 23:59:59.7500000,374,44\n\n2023-11-17 00:00:04.0000001,396,109\n"
    first, second = parse_trace(text, "a.csv")
    assert first == TraceRequest(0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.2500001, abs=1e-6)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=50
    )
)
def test_what_is_written_is_read(lines: list[tuple[int, int, int]]) -> None:
    lines.sort()
    text = "\n".join([FIRST, *(f"{ms / 1000:.3f},{prompt},{new}" for ms, prompt, new in lines)])
    read = parse_trace(text, "a.csv")
    assert [(one.prompt_tokens, one.generated_tokens) for one in read] == [line[1:] for line in lines]
    assert [one.arrival_s for one in read] == pytest.approx([(ms - lines[0][0]) / 1000 for ms, _, _ in lines])


@given(st.text(max_size=200))
def test_any_text_is_a_trace_or_a_sentence_that_names_the_file(text: str) -> None:
    try:
        found = parse_trace(f"{FIRST}\n{text}", "some.csv")
    except TraceError as error:
        said = str(error)
    else:
        said = "some.csv" if found else ""
    assert said.startswith("some.csv")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.csv has no request"),
        (FIRST, "a.csv has no request"),
        ("time,in,out\n1,2,3", "a.csv, line 1: the header must be"),
        (f"{FIRST}\n0,1", "a.csv, line 2 has 2 cells, the header 3"),
        (f"{FIRST}\nsoon,1,1", "line 2, column 1 (arrival_s): 'soon' is no number of seconds"),
        (f"{FIRST}\ninf,1,1", "line 2, column 1 (arrival_s): 'inf' is no time"),
        (f"{FIRST}\n5,1,1\n4,1,1", "line 3, column 1 (arrival_s): the time is before that of the line above"),
        (f"{FIRST}\n0,few,1", "line 2, column 2 (prompt_tokens): 'few' is no number of tokens"),
        (f"{FIRST}\n\n0,1,0", "line 3, column 3 (generated_tokens): 0 is no number of tokens"),
        (f"{AZURE}\nyesterday,1,1", "line 2, column 1 (TIMESTAMP): 'yesterday' is no time such as"),
        (f'{FIRST}\n"0,1,1', "a.csv, line 2, is no comma-separated text"),
    ],
)
def test_what_is_no_trace_is_one_sentence_with_file_line_and_column(text: str, message: str) -> None:
    with pytest.raises(TraceError) as raised:
        parse_trace(text, "a.csv")
    assert message in str(raised.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no text in UTF-8"):
        read_trace(tmp_path / "bytes.csv")
