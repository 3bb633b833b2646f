"""Generated cases are the same in every run."""

import importlib.util
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples


def cases() -> list[tuple[int, str]]:
    """What a test is given that asks for numbers and texts."""
    found: list[tuple[int, str]] = []

    @settings(max_examples=examples(300))
    @given(st.integers(), st.text())
    def note(number: int, text: str) -> None:
        found.append((number, text))

    note()
    return found


def test_cases_do_not_depend_on_the_modules_that_are_loaded(tmp_path: Path) -> None:
    before = cases()
    file = tmp_path / "numbers_and_texts.py"
    file.write_text("\n".join(f"number_{n}, text_{n} = {7_000_000 + n}, 'text {n}'" for n in range(100)))
    found = importlib.util.spec_from_file_location("numbers_and_texts", file)
    assert found is not None
    sys.modules["numbers_and_texts"] = importlib.util.module_from_spec(found)
    try:
        assert cases() == before
    finally:
        del sys.modules["numbers_and_texts"]
