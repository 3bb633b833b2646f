"""How a benchmark prints what it found."""


class Table:
    """Rows of bar, figure and verdict, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def note(self, name: str, text: str, **figures: object) -> None:
        """A row without a bar."""
        self._add(name, "", text, "", figures)

    def judge(
        self, name: str, figure: float, unit: str, bar: float, *, least: bool = False, **more: object
    ) -> None:
        """A row with one: the figure must be at most the bar, with `least` at least."""
        held = figure >= bar if least else figure <= bar
        sign = ">=" if least else "<="
        self._add(
            name, f"{sign} {bar:.4g} {unit}", f"{figure:.4g} {unit}", "holds" if held else "MISSED",
            {"figure": figure, "bar": bar, "unit": unit, "held": held, **more},
        )  # fmt: skip

    def _add(self, name: str, bar: str, figure: str, verdict: str, figures: dict[str, object]) -> None:
        self.rows.append({"name": name, **figures})
        print(f"  {name:<44}{bar:>16}  {figure:<40}{verdict}", flush=True)
