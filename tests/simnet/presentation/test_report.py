"""The report of a run: one HTML file that parses, asks for nothing, and holds what was run."""

import errno
import re
import tempfile
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.commands import run_app
from molink.simnet.cli import app
from molink.simnet.presentation.drawing import draw
from molink.simnet.presentation.figures import Figure, Panel, Series
from molink.simnet.presentation.report import Report, render
from molink.simnet.presentation.tables import Grid, TableCell, TableLine

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements must be closed in order; what they say is kept by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
            self.said.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.said[tag][-1] += data


def grid_of(*lines: tuple[TableCell, ...], sub: bool = False) -> Grid:
    columns = len(lines[0])
    headings = tuple(f"column {number}" for number in range(columns))
    shown = tuple(TableLine(cells, sub, ends=False) for cells in lines)
    return Grid("a table", headings, (True,) * columns, 1, shown, ("a note",))


def page_of(
    title: str = "t",
    parameters: dict[str, object] | None = None,
    tables: tuple[Grid, ...] = (),
    remarks: tuple[str, ...] = (),
    pictures: tuple[tuple[Figure, Path], ...] = (),
) -> str:
    command = "molink-simnet cost --table 3"
    return render(Report(title, "2026-01-02 03:04 UTC", command, parameters or {}, tables, remarks, pictures))


def run(*arguments: str) -> int:
    return run_app(app, "molink-simnet", list(arguments))


def report_in(folder: Path) -> Page:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    page = Page(text)
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(value is not None and value.startswith("data:image/png;base64,") for value in links)
    assert "http" not in re.sub(r'src="[^"]*"', "", text)
    assert metadata.version("molink") in page.said["footer"][0]
    return page


@given(st.text(min_size=1))
def test_whatever_is_said_is_escaped_and_read_back(said: str) -> None:
    page = Page(page_of(said, {"name": said}, (grid_of((TableCell(said),)),), (said,)))

    def spoken(text: str) -> str:
        return re.sub(r"\s+", " ", text.replace("\x00", "\ufffd")).strip()

    for tag in ("h1", "td", "p"):
        assert spoken(said) in {spoken(one) for one in page.said[tag]}


def test_tables_have_their_colours_and_parts_of_a_line_stand_in() -> None:
    text = page_of(tables=(grid_of((TableCell("seldom", "dim"), TableCell("better", "green")), sub=True),))
    assert Page(text).said["td"][:2] == ["seldom", "better"]
    assert re.search(r'<td class="[^"]*green">better', text)
    assert re.search(r'<tr class="[^"]*sub">', text)


def test_a_report_says_when_it_was_made_and_by_which_command() -> None:
    page = Page(page_of())
    assert page.said["pre"] == ["molink-simnet cost --table 3"]
    assert "2026-01-02 03:04 UTC" in page.said["p"]


def test_parameters_are_named_with_their_values_and_parts_stand_below() -> None:
    parameters = {"seed": 7, "spans": [[0, 2], [2, 4]], "policies": ["a", "b"], "none": None, "of": {"x": 1}}
    text = page_of(parameters=parameters)
    page = Page(text)
    values = dict(zip(page.said["th"], page.said["td"], strict=True))
    assert values == {
        "seed": "7",
        "spans": "0, 2 | 2, 4",
        "policies": "a, b",
        "none": "-",
        "of": "",
        "x": "1",
    }
    assert text.index("end sub") > text.index("<th>of")


def test_pictures_are_taken_in_with_their_captions_and_their_words(tmp_path: Path) -> None:
    panel = Panel([Series("molink", [1, 2], [1.0, 2.0])], "requests/s", "TTFT, s")
    figure = Figure("figure", "what it shows", [panel], ("x",), [])
    draw(figure, tmp_path / "figure.png")
    page = Page(page_of(pictures=((figure, tmp_path / "figure.png"),)))
    assert page.said["figcaption"] == ["what it shows"]
    assert any(said.startswith("TTFT: time to first token") for said in page.said["p"])
    with pytest.raises(OSError, match="none"):
        page_of(pictures=((figure, tmp_path / "none"),))


def check_report(folder: Path, arguments: tuple[str, ...], held: tuple[str, ...]) -> None:
    """That the command leaves a report with these words and all the pictures that it drew."""
    assert run(*arguments, "--output", str(folder)) == 0
    page = report_in(folder)
    for text in held:
        assert text in page.said["body"][0]
    assert len(page.said.get("figure", [])) == len(list(folder.glob("*.png")))


def test_cost_leaves_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_report(tmp_path, ("cost", "--table", "3"), ("Cost-profit margins", "Petals", "-24.5%"))
    assert capsys.readouterr().err == f"wrote result.json, report.html to {tmp_path}\n"


def test_a_report_of_ones_own_figures_says_that_they_are(tmp_path: Path) -> None:
    arguments = ("cost", "--throughput-tps", "120", "--devices", "3")
    check_report(tmp_path, arguments, ("Cost-profit margins of your own figures", "yours"))
    assert "table own" not in report_in(tmp_path).said["body"][0]


@pytest.mark.full
def test_a_sweep_leaves_a_report(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,generated_tokens\n0,700,3\n1,60,4\n2,5,2\n")
    sweep = (
        "serve",
        "--sweep",
        "rate=0.3",
        "--policies",
        "molink",
        "--duration",
        "10",
        "--trace",
        str(trace),
    )
    check_report(tmp_path, sweep, ("Sweep over rate", "molink", "qwen2-7b on rtx-4090", "seed"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        (
            ("schedule", "--testbed", "4", "--seeds", "1", "--algorithms", "greedy"),
            ("testbed 4", "greedy", "Figure 7"),
        ),
        (
            ("redundancy", "--rates", "4", "--duration", "3", "--warm-up", "1", "--jobs", "1"),
            ("accellm", "mixed", "Llama-2-70B"),
        ),
        (
            ("swarm", "--peers", "12", "--hours", "0.02", "--rate", "0.2", "--model", "qwen2-7b"),
            ("A swarm of 12 peers", "TPOT mean, median, 95 %", "qwen2-7b"),
        ),
    ],
)
def test_every_other_command_leaves_a_report_of_what_it_ran(
    arguments: tuple[str, ...], held: tuple[str, ...], tmp_path: Path
) -> None:
    check_report(tmp_path, arguments, held)


@pytest.mark.full
def test_communication_leaves_a_report_with_the_figures_of_its_paper(tmp_path: Path) -> None:
    assert run("communication", "--tp", "2", "--decode", "4", "--output", str(tmp_path)) == 0
    page = report_in(tmp_path)
    assert "llama-3.1-8b, TP=2" in page.said["body"][0]
    assert len(page.said["figcaption"]) == 8


@pytest.mark.parametrize("command", ["cost", "communication", "schedule", "swarm", "redundancy", "serve"])
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_computed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert run(command, "--output", str(tmp_path)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(
        f"--output {tmp_path} cannot be written to: Read-only file system; name another folder\n"
    )
