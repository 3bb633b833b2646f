"""Tables as descriptions: what a column says, what is left out, and that no terminal cuts it."""

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from molink.simnet.presentation.tables import WORDS, Column, Table, explained, laid_out, three_digits
from molink.simnet.presentation.terminal import show


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    rate_rps: float
    ttft_s: float | None
    paper_ttft_s: float | None = None
    gain: float | None = None
    paper_gain: float | None = None


RATE = Column("rate", "rate_rps", "req/s", "g")
TTFT = Column("TTFT", "ttft_s", "s", three_digits, printed="paper_ttft_s", change="gain", sign=-1)
POLICY = Column("policy", "policy")
ROWS = (Row("vllm", 0.1, 2.0), Row("molink", 0.1, 1.0, gain=0.5), Row("vllm", 0.2, None))


def test_settings_that_vary_are_said_once_and_the_others_in_the_title() -> None:
    table = laid_out(Table("t", (POLICY, TTFT), ROWS, by=(RATE,)))
    assert table.headings == ("rate\nreq/s", "policy", "TTFT\ns")
    assert [line.cells[0].text for line in table.lines] == ["0.1", "", "0.2"]
    assert [line.ends for line in table.lines] == [False, True, True]
    assert laid_out(Table("t", (POLICY, TTFT), ROWS[:2], by=(RATE,))).title == "t, 0.1 req/s"


def test_a_change_stands_in_brackets_in_the_colour_of_what_it_is() -> None:
    table = laid_out(Table("t", (TTFT,), ROWS))
    assert [line.cells[0].text for line in table.lines] == ["2.00", "1.00 (-50%)", "-"]
    assert [line.cells[0].style for line in table.lines] == ["", "green", ""]


def test_what_a_paper_prints_has_a_column_only_where_it_prints_something() -> None:
    printed = (*ROWS, Row("paper", 0.2, 1.5, 9.29, paper_gain=0.46))
    table = laid_out(Table("t", (POLICY, TTFT), printed))
    assert table.headings == ("policy", "TTFT\ns", "printed\ns")
    assert table.lines[-1].cells[2].text == "9.29 (-46%)"
    assert table.notes == tuple(f"{word}: {WORDS[word]}" for word in ("TTFT", "printed", "policy paper"))


def test_on_its_side_a_column_is_a_line_and_a_row_a_column() -> None:
    columns = (Column("all", "rate_rps", "req/s"), Column("a part", "ttft_s", "s", sub=True, ends=True))
    table = laid_out(Table("t", columns, ROWS[:2], on_its_side="policy"))
    assert table.headings == ("", "vllm", "molink")
    assert [[cell.text for cell in line.cells] for line in table.lines] == [
        ["all, req/s", "0.1", "0.1"],
        ["a part, s", "2.0", "1.0"],
    ]
    assert [line.sub for line in table.lines] == [False, True]


def test_values_have_three_digits() -> None:
    assert [three_digits(value) for value in (0.0, 0.1234, 12.34, 1234.5)] == [
        "0.00",
        "0.123",
        "12.3",
        "1234",
    ]


def test_words_are_explained_where_they_are_said() -> None:
    assert explained(["TPOT, ms"]) == [f"TPOT: {WORDS['TPOT']}"]
    assert explained(["TPOTS", "papers"]) == []


@pytest.mark.parametrize("width", [40, 60, 80])
def test_what_is_too_wide_continues_below_with_its_keys(width: int) -> None:
    columns = (POLICY, *(Column(f"a heading {number}", "rate_rps") for number in range(9)))
    written = io.StringIO()
    show(laid_out(Table("t", columns, ROWS)), Console(file=written, width=width, color_system=None))
    lines = written.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert all(f"a heading {number}" in written.getvalue() for number in range(9))
    assert sum("molink" in line for line in lines) == sum("policy" in line for line in lines) > 1
