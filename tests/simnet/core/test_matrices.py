"""Files of round-trip times: what is read, and what is said of a file that is something else."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.simnet.core.matrices import MatrixError, RttMatrix, bundled_matrix, parse_matrix, read_matrix

SMALL = "region,a,b\na,1,20\nb,30.5,2\n"
NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)


def written(matrix: RttMatrix, order: list[int]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["from", *matrix.regions])
    writer.writerows([matrix.regions[row], *matrix.rtt_ms[row].tolist()] for row in order)
    return out.getvalue()


@st.composite
def matrices(draw: st.DrawFn) -> RttMatrix:
    regions = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    rtts = st.lists(st.floats(0, 1e6), min_size=len(regions), max_size=len(regions))
    table = draw(st.lists(rtts, min_size=len(regions), max_size=len(regions)))
    return RttMatrix(tuple(regions), np.array(table))


def test_rows_are_where_it_goes_from_and_columns_where_it_goes_to() -> None:
    matrix = parse_matrix(SMALL, "small.csv")
    assert matrix.regions == ("a", "b")
    assert matrix.rtt_ms.tolist() == [[1, 20], [30.5, 2]]


def test_the_bundled_matrix_has_21_regions_and_the_facts_that_its_provenance_states() -> None:
    matrix = bundled_matrix()
    between = ~np.eye(21, dtype=bool)
    assert len(matrix.regions) == 21
    assert matrix.rtt_ms[between].mean() == pytest.approx(152.6, abs=0.05)
    assert matrix.rtt_ms.diagonal().max() < 10


@given(matrices(), st.randoms())
def test_what_is_written_is_read_again_whatever_the_order_of_its_rows(
    matrix: RttMatrix, random: object
) -> None:
    order = list(range(len(matrix.regions)))
    random.shuffle(order)  # type: ignore[attr-defined]
    again = parse_matrix(written(matrix, order), "again.csv")
    assert again.regions == matrix.regions
    assert np.array_equal(again.rtt_ms, matrix.rtt_ms)


@given(st.text(st.sampled_from('ab,1-.\n\r "\0;eN'), max_size=60) | st.text(max_size=60))
def test_any_other_text_is_refused_in_one_sentence_that_names_the_file(text: str) -> None:
    refusal, regions, shape = "some.csv", 0, (0, 0)
    try:
        matrix = parse_matrix(text, "some.csv")
        regions, shape = len(matrix.regions), matrix.rtt_ms.shape
    except MatrixError as error:
        refusal = str(error)
    assert refusal.startswith("some.csv")
    assert shape == (regions, regions)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "m.csv is empty: it needs a header row and a row for each region"),
        ("region;a;b\n", "m.csv, row 1: the header names no region; are the values separated by commas?"),
        ("region,a,a\n", "m.csv, row 1, column 3: the header names region 'a' twice"),
        ("region,a,\n", "m.csv, row 1, column 3: the header has no name"),
        ("region,a,b\na,1,2\n", "m.csv has no row for region 'b', which its header names"),
        ("region,a,b\na,1,2\nc,1,2\n", "m.csv, row 3: the header has no column 'c'"),
        ("region,a,b\na,1,2\n\na,1,2\n", "m.csv, row 4: region 'a' has a row already"),
        ("region,a,b\na,1\n", "m.csv, row 2 (a) has 1 values, the header 2 regions"),
        ("region,a,b\na,1,x\n", "m.csv, row 2 (a), column 3 (b): 'x' is no number"),
        ("region,a,b\na,1,\n", "m.csv, row 2 (a), column 3 (b): the value is missing"),
        *(
            (
                f"region,a,b\na,1,{value}\n",
                f"m.csv, row 2 (a), column 3 (b): {value} is no round-trip time in milliseconds (0 to 1000000)",
            )
            for value in ("-1", "nan", "inf", "1e7")
        ),
    ],
)
def test_an_error_names_file_row_and_column(text: str, sentence: str) -> None:
    with pytest.raises(MatrixError) as raised:
        parse_matrix(text, "m.csv")
    assert str(raised.value) == sentence


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match=r"nowhere\.csv cannot be read: No such file"):
        read_matrix(tmp_path / "nowhere.csv")
    picture = tmp_path / "picture.csv"
    picture.write_bytes(b"\x89PNG\xff")
    with pytest.raises(MatrixError, match=r"picture\.csv is no text in UTF-8: byte 0"):
        read_matrix(picture)


def test_a_file_of_a_spreadsheet_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    path.write_text(SMALL, encoding="utf-8-sig")
    assert read_matrix(path).regions == ("a", "b")
