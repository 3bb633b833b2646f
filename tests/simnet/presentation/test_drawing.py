"""Pictures: a name has one look in all figures, no legend is cut, and counts have whole ticks."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from molink.simnet.presentation.drawing import draw
from molink.simnet.presentation.figures import Figure, Panel, Series


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Canvas]:
    """What was saved, to be looked at."""
    kept: list[Canvas] = []
    save = Canvas.savefig

    def keep(self: Canvas, *arguments: object, **named: object) -> None:
        kept.append(self)
        save(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Canvas, "savefig", keep)
    return kept


def figure_of(*names: str, kind: str = "lines", counts: tuple[int, ...] = (1, 3, 5)) -> Figure:
    series = [Series(name, counts, list(counts)) for name in names]
    panel = Panel(series, "peers", "hops", kind)  # type: ignore[arg-type]
    return Figure("stem", "caption", [panel], ("x",), [], size=(4.0, 3.0))


def colour(axes: Axes, name: str) -> object:
    handles, labels = axes.get_legend_handles_labels()
    handle = handles[labels.index(name)]
    return handle.patches[0].get_facecolor() if hasattr(handle, "patches") else handle.get_color()


def test_a_system_has_the_same_colour_beside_whatever_it_is_drawn(
    drawn: list[Canvas], tmp_path: Path
) -> None:
    for names in (("concurrent", "molink"), ("vllm", "splitwise", "molink", "other"), ("molink",)):
        draw(figure_of(*names), tmp_path / "a.png")
    assert len({colour(canvas.axes[0], "molink") for canvas in drawn}) == 1
    shown = [colour(drawn[1].axes[0], name) for name in ("vllm", "splitwise", "molink", "other")]
    assert len(set(shown)) == 4


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_a_long_legend_takes_as_many_lines_as_it_needs(
    kind: str, drawn: list[Canvas], tmp_path: Path
) -> None:
    names = [f"an algorithm with a long name, number {number}" for number in range(9)]
    draw(figure_of(*names, kind=kind), tmp_path / "a.png")
    [canvas] = drawn
    [legend] = canvas.legends
    assert len(legend.get_texts()) == len(names)
    box = legend.get_window_extent()
    assert canvas.bbox.x0 <= box.x0
    assert box.x1 <= canvas.bbox.x1


@pytest.mark.parametrize("counts", [(1, 2, 3), tuple(range(1, 15)), (2, 3)])
def test_counts_have_whole_ticks(counts: tuple[int, ...], drawn: list[Canvas], tmp_path: Path) -> None:
    draw(figure_of("molink", counts=counts), tmp_path / "a.png")
    [canvas] = drawn
    for axis in (canvas.axes[0].xaxis, canvas.axes[0].yaxis):
        assert all(float(place).is_integer() for place in axis.get_majorticklocs())
