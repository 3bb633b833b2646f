"""docs/MODELS.md says what the engine does, and peers find out by themselves what they can serve."""

from pathlib import Path

import generate_models
import pytest
from generate_models import PATH, architectures, find_rows, found_line, render, written_rows
from support.models.architecture_table import store_tiny
from support.models.reference_models import ALIBI_SLOPES
from support.models.tiny_models import ARCHITECTURES
from transformers import CONFIG_MAPPING

from molink.shards.attention.attention import alibi_slopes
from molink.shards.checkpoint.store import describe
from molink.shards.loading.loader import StageSettings, load_stage

QUICK = ("bloom", "bert", "bart", "deepseek_v4")
"""Left-padded, refused for two reasons, and refused by trial; packed ones are tried in `test_exact_in_every_way`."""


@pytest.mark.parametrize("architecture", QUICK)
def test_the_table_says_what_is_found(architecture: str) -> None:
    assert written_rows(PATH.read_text(encoding="utf-8"))[architecture] == found_line(architecture, print)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_the_whole_table_is_current() -> None:
    assert render(find_rows(architectures(), print, jobs=2)) == PATH.read_text(encoding="utf-8")


def test_a_table_that_was_tried_in_part_keeps_its_other_rows() -> None:
    text = PATH.read_text(encoding="utf-8")
    rows = written_rows(text)
    assert tuple(sorted(rows)) == tuple(sorted(architectures()))
    assert render(rows) == text
    changed = render(rows | {"gemma": "| `gemma` | none |"})
    assert set(text.splitlines()) - set(changed.splitlines()) > {rows["gemma"]}
    assert written_rows(changed) == rows | {"gemma": "| `gemma` | none |"}


def test_whatever_is_served_is_exact() -> None:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert sum("| packed |" in line or "| left-padded |" in line for line in lines) > 80
    assert not [line for line in lines if "| NO |" in line]
    assert not [name for name in generate_models.TABLE_1 if not any(f"`{name}`" in line for line in lines)]


@pytest.mark.parametrize("heads", [4, 6])
def test_slopes_of_linear_biases_are_those_of_the_paper(heads: int) -> None:
    assert alibi_slopes(heads).tolist() == ALIBI_SLOPES[heads]


@pytest.mark.parametrize("name", ["gpt2", "falcon", "deepseek_v2", "gemma3"])
def test_the_kv_cache_is_as_large_as_described(name: str, tmp_path: Path) -> None:
    architecture, settings = ARCHITECTURES[name]
    store_tiny(CONFIG_MAPPING[architecture](**settings), tmp_path)
    assert_described(tmp_path)


def test_the_kv_cache_of_layers_with_heads_of_their_own_is_as_large_as_described(tmp_path: Path) -> None:
    store_tiny(CONFIG_MAPPING["gemma4_unified_text"](), tmp_path)
    assert len(set(assert_described(tmp_path))) == 2


def assert_described(folder: Path) -> tuple[int, ...]:
    spec = describe(folder, "float32")
    layouts = load_stage(folder, spec.whole, StageSettings("float32")).layouts
    assert spec.kv_bytes_per_token == tuple(layouts[layer].bytes_per_token for layer in range(spec.layers))
    return spec.kv_bytes_per_token
