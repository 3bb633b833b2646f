"""Of models that take more than text, the text part is served, and its tensors alone are read.

That it is exact, `test_exact_in_every_way` shows.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.devices.rank_threads import RankThreads
from support.models.architecture_table import configuration_of, store_tiny
from support.models.circuit_runs import engine_with, greedy
from support.models.exactness import SPLITS
from support.models.hub_models import hub_side
from support.models.measured_models import TinyModel, joining_faults, whole_model
from support.models.tiny_models import load_reference
from transformers import CONFIG_MAPPING

from molink.shards.checkpoint.grouping import group_names
from molink.shards.checkpoint.safetensors_header import read_header
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.probe import config_refusal
from molink.shards.spec import Span

QUICK = ("gemma3", "mistral3", "qwen2_vl")
TOWERS = ("vision", "visual", "audio", "projector")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny whole models, each made once."""
    made: dict[str, Path] = {}

    def of(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            store_tiny(configuration_of(architecture), made[architecture])
        return made[architecture]

    return of


def names_in(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("architecture", QUICK)
def test_they_are_described_and_verified_by_their_text_part(
    architecture: str, stored: Callable[[str], Path]
) -> None:
    folder = stored(architecture)
    spec, manifest = describe(folder, "float32"), read_manifest(folder)
    assert spec.architecture == architecture
    for span in (Span(0, 2), Span(1, 4), spec.whole):
        stage = load_stage(folder, span, StageSettings("float32"), manifest=manifest)
        assert stage.weight_bytes == spec.weight_bytes(span)
        assert [stage.layouts[layer].bytes_per_token for layer in span] == [
            spec.kv_bytes_per_token[layer] for layer in span
        ]


@pytest.mark.parametrize("architecture", QUICK)
def test_no_tower_is_in_any_group(architecture: str, stored: Callable[[str], Path]) -> None:
    folder = stored(architecture)
    names = names_in(folder)
    groups = group_names(names, json.loads((folder / "config.json").read_text()))
    grouped = {name for group in (groups.embed, *groups.layers.values(), groups.head) for name in group}
    assert not [name for name in grouped if any(tower in name for tower in TOWERS)]
    assert all(any(tower in name for tower in TOWERS) for name in set(names) - grouped)
    assert len(groups.layers) == 4


def test_a_hub_is_asked_for_the_ranges_of_the_spans_text_tensors_only(
    stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = stored("gemma3")
    layers = [name for name in names_in(folder) if "language_model" in name and ".layers.1." in name]
    assert [name for name in names_in(folder) if "vision" in name]
    span, manifest = Span(1, 2), read_manifest(folder)
    with hub_side(folder, tmp_path) as side, side.store() as store:
        weights = side.weights(store)
        side.hub.weight_ranges()
        with weights.ready(span, manifest, lambda *_: None) as parts:
            stage = load_stage(folder, span, StageSettings("float32"), manifest=manifest, parts=parts)
            assert sorted(parts) == sorted(layers)
        asked = {
            at
            for own in side.hub.weight_ranges().values()
            for start, stop in own
            for at in range(start, stop)
        }
    headers = [one for one in read_header(folder / "model.safetensors") if one.name in layers]
    assert asked == {at for one in headers for at in range(one.start, one.stop)}
    assert stage.weight_bytes == describe(folder, "float32").weight_bytes(span)


@pytest.mark.full
def test_a_configuration_that_is_flat_as_it_was_published_is_the_same_model(
    stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = stored("qwen2_vl")
    nested = json.loads((folder / "config.json").read_text())
    text = nested.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": text["rope_parameters"]["mrope_section"]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(text | nested))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert describe(tmp_path, "float32").layer_bytes == describe(folder, "float32").layer_bytes
    prompt, whole = (5, 9, 30, 31, 7), Span(0, 4)
    assert greedy([(engine_with(tmp_path, (0, 4)), whole)], prompt, 12) == greedy(
        [(engine_with(folder, (0, 4)), whole)], prompt, 12
    )


@pytest.mark.full
def test_two_ranks_share_a_text_part(stored: Callable[[str], Path]) -> None:
    folder = stored("mistral3")
    manifest = read_manifest(folder)
    ranks = RankThreads(folder, manifest, describe(manifest, "float32"), 2)
    prompt = [5, 6, 7, 9, 11, 20, 3]
    expected = load_reference(folder)(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(ranks.step(prompt)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_a_text_part_can_be_quantized(stored: Callable[[str], Path]) -> None:
    folder = stored("llava")
    spec = describe(folder, "float32", "int8")
    stage = load_stage(folder, Span(1, 3), StageSettings("float32", "int8"), manifest=read_manifest(folder))
    assert stage.weight_bytes <= 1.01 * spec.weight_bytes(Span(1, 3))


@pytest.mark.full
def test_a_tensor_that_the_text_part_needs_is_missed_and_one_of_a_tower_is_not(
    stored: Callable[[str], Path],
) -> None:
    folder = stored("llava")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys() if "language_model" in name}  # noqa: SIM118
        assert load_stage(folder, Span(1, 2), StageSettings("float32"), parts=parts).span == Span(1, 2)
        del parts[next(name for name in parts if "layers.1.mlp.up_proj" in name)]
        with pytest.raises(WeightsError, match=r"language_model\.layers\.1\.mlp\.up_proj"):
            load_stage(folder, Span(1, 2), StageSettings("float32"), parts=parts)


def test_a_kind_whose_small_models_are_refused_is_served_where_their_peculiarities_are_absent(
    tmp_path: Path,
) -> None:
    plain = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    for text, reason in (
        (plain, None),
        (plain | {"num_kv_shared_layers": 2}, "keys and values of others"),
        ({}, "token ids"),
    ):
        found = config_refusal(CONFIG_MAPPING["gemma4"](text_config=text))
        assert (found is None) if reason is None else (found is not None and reason in found)
    store_tiny(CONFIG_MAPPING["gemma4"](text_config=plain), tmp_path)
    model = TinyModel("gemma4", tmp_path, describe(tmp_path).vocabulary_size, whole_model(tmp_path))
    assert joining_faults(model, model.circuit(SPLITS[-1])) == []


ABOVE = st.sampled_from(("model", "language_model.model", "model.language_model"))
SEPARATE = st.sampled_from(("visual", "vision_tower.encoder", "audio_tower", "mtp", "model.vision_tower"))


@given(
    above=st.sampled_from(("model", "language_model.model", "model.language_model")),
    tower=SEPARATE,
    deep=st.integers(1, 9),
)
def test_layers_beside_the_token_embedding_are_the_decoders(above: str, tower: str, deep: int) -> None:
    head = "language_model.lm_head" if above.startswith("language") else "lm_head"
    text = [
        f"{above}.embed_tokens.weight",
        f"{above}.norm.weight",
        f"{head}.weight",
        f"{above}.layers.0.mlp.weight",
    ]
    other = [*(f"{tower}.layers.{index}.mlp.weight" for index in range(deep)), f"{tower}.norm.weight"]
    if not tower.startswith(f"{above}."):
        groups = group_names([*other, *text], {"vision_config": {}})
        assert groups.embed == (text[0],)
        assert groups.layers == {0: (text[3],)}
        assert groups.head == (text[1], text[2])


def test_a_model_that_reads_its_prompt_in_both_directions_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["paligemma"]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="looks at later tokens"):
        load_stage(tmp_path, Span(0, 1), StageSettings("float32"))
