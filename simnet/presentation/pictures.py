"""How figures are made and kept: a picture, and a table of what it shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which colour-blind readers tell apart."""
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_DPI = 150
_ROOM = 1.04


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure in a folder."""

    caption: str
    stem: Path
    """Of its two files: the picture is .png, what it shows is .csv."""

    @property
    def png(self) -> Path:
        return self.stem.with_suffix(".png")

    @property
    def files(self) -> tuple[Path, Path]:
        return self.stem.with_suffix(".csv"), self.png


def new_figure(width: float, height: float) -> "Figure":
    """In inches. Without pyplot: no window system, nothing global."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: "Figure", stem: Path, caption: str) -> Picture:
    """Writes the picture; whoever drew it writes the table. OSError if it cannot."""
    picture = Picture(caption, stem)
    figure.savefig(picture.png)
    return picture


def from_zero(axes: "Axes") -> None:
    """The vertical axis begins at 0, with room above the highest of what was drawn."""
    axes.set_ylim(0.0, _ROOM * max(axes.get_ylim()[1], axes.dataLim.y1))


def legend_below(figure: "Figure", labels: Sequence[str] | None = None) -> None:
    """One legend for all panels; of these labels in their order, or of those of the first panel."""
    shown: dict[str, Artist] = {}
    for axes in figure.axes if labels is not None else figure.axes[:1]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    names = [label for label in labels or shown if label in shown]
    figure.legend(
        [shown[name] for name in names], names, loc="outside lower center", ncols=len(names), frameon=False
    )
