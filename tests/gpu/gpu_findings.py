"""What a case found: rows of name, bar, figure and verdict, as values that go through a file."""

from dataclasses import dataclass
from pathlib import Path

from bench.tables import Table


class CannotRun(Exception):
    """A case has no meaning on this machine, for the reason that the text says."""


@dataclass(frozen=True, slots=True)
class Context:
    """Where and how large a case runs."""

    device: str
    """As torch names it: `cuda:0`, `cpu`."""
    folder: Path
    """Its own, empty; removed at the end."""
    budget_s: float
    """A case that looks after its own time ends before this."""
    part: int = 0
    parts: int = 1
    """A case that is divided does every `parts`-th of its work, from the `part`-th on."""

    @property
    def small(self) -> bool:
        """On a processor everything is tiny: it shows that the case runs, and what holds on every device."""
        return not self.device.startswith("cuda")

    def share(self, work: list[str]) -> list[str]:
        """This part's share of the work."""
        return work[self.part :: self.parts]


class Findings(Table):
    """As a benchmark's table, kept instead of printed, and with rows that hold or do not."""

    def __init__(self, *, judges_speed: bool) -> None:
        """Without `judges_speed` figures of speed are told and have no verdict: their bars are another device's."""
        super().__init__()
        self._judges_speed = judges_speed

    def judge(
        self, name: str, figure: float, unit: str, bar: float, *, least: bool = False, **more: object
    ) -> None:
        """A figure of speed beside its bar."""
        if self._judges_speed:
            super().judge(name, figure, unit, bar, least=least, **more)
        else:
            self.note(name, f"{figure:.4g} {unit} (not judged here)", figure=figure, bar=bar, **more)

    def bound(self, name: str, figure: float, unit: str, bar: float, **more: object) -> None:
        """A figure that has to be at most the bar on every device."""
        super().judge(name, figure, unit, bar, **more)

    def hold(self, name: str, held: bool, text: str, **figures: object) -> None:
        """What has to be so on every device."""
        self._add(name, "", text, "holds" if held else "MISSED", {"held": held, **figures})

    def _add(self, name: str, bar: str, figure: str, verdict: str, figures: dict[str, object]) -> None:
        texts = {"bar_text": bar, "figure_text": figure, "verdict": verdict}
        self.rows.append({"name": name, **texts, **figures})
