"""A draft model is for one tokenizer, and within the peer's memory; else one sentence says why."""

import json
import shutil
from pathlib import Path

import pytest
from support.models.tiny_models import make_tiny_model

from molink.peer.daemon.draft import DraftUnusable, draft_bytes, guesses_of, open_draft
from molink.peer.drafting.draft_thread import DraftThread
from molink.peer.models.model import LocalModel
from molink.shards.checkpoint.catalog import resolve
from molink.shards.checkpoint.store import describe, read_manifest

SERVED, DRAFT = "molink/tiny-shakespeare", "molink/tiny-shakespeare-draft"


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Hashes of the served model's files."""
    return dict(read_manifest(resolve(SERVED)).files)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    manifest = read_manifest(folder := resolve(SERVED))
    return LocalModel(folder, manifest, describe(manifest, "float32", "none", name=SERVED))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled draft model."""
    return Path(shutil.copytree(resolve(DRAFT), tmp_path / "draft"))


def test_the_bundled_draft_is_for_the_bundled_model_and_takes_a_megabyte(files: dict[str, str]) -> None:
    draft = open_draft(DRAFT, SERVED, files, 100_000_000)
    assert draft.embedding.shape == (1024, 128)
    assert draft_bytes(draft) < 50_000_000
    assert sum(file.stat().st_size for file in resolve(DRAFT).iterdir()) <= 1_000_000


def test_another_tokenizer_is_named_by_both_hashes(files: dict[str, str], folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DraftUnusable, match="another tokenizer") as refused:
        open_draft(str(folder), SERVED, files, None)
    assert files["tokenizer.json"][:16] in str(refused.value)
    assert "44136fa355b3678a" in str(refused.value)


def test_without_room_the_missing_bytes_are_said(files: dict[str, str]) -> None:
    needed_bytes = draft_bytes(open_draft(DRAFT, SERVED, files, None))
    with pytest.raises(DraftUnusable, match=f": {needed_bytes - 500_000} bytes are missing"):
        open_draft(DRAFT, SERVED, files, 1_000_000)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "gpt2"}, "no Llama"),
        ({"attention_bias": True}, "no Llama"),
        ({"num_hidden_layers": 3}, "cannot be read"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    changed: dict[str, object], said: str, files: dict[str, str], folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(DraftUnusable, match=said):
        open_draft(str(folder), SERVED, files, None)


def test_a_large_model_is_no_small_one_and_one_that_is_not_here_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(DraftUnusable, match="5116608 parameters, and a small one has 4000000 at most"):
        open_draft(SERVED, SERVED, files, None)
    with pytest.raises(DraftUnusable, match=r"neither bundled nor a directory.*--local-dir DIR"):
        open_draft("somebody/draft", SERVED, files, None)
    with pytest.raises(DraftUnusable, match="no such directory"):
        open_draft("no model at all", SERVED, files, None)


def tiny_draft(architecture: str, tmp_path: Path) -> str:
    """A tiny model of that architecture with the served model's tokenizer, in several files."""
    made = make_tiny_model(architecture, tmp_path, max_shard_size="50KB")
    shutil.copy(resolve(SERVED) / "tokenizer.json", made / "tokenizer.json")
    return str(made)


@pytest.mark.full
def test_what_is_not_small_or_no_llama_is_computed_on_the_device(model: LocalModel, tmp_path: Path) -> None:
    for option in (SERVED, tiny_draft("qwen2", tmp_path)):
        guesses, taken_bytes = guesses_of(option, model, None)
        assert guesses is not None
        assert isinstance(guesses.draft, DraftThread)
        assert guesses.draft.times.alone_ms > 0
        assert guesses.announced[-1].name == Path(option).name
        assert guesses.announced[-1].guess_ms == guesses.draft.times.alone_ms
        weights = sum(file.stat().st_size for file in resolve(option).glob("*.safetensors"))
        held_bytes = guesses.draft.cache_bytes + weights  # which may be stored in half of what is computed in
        assert held_bytes * 0.9 < taken_bytes < held_bytes + 1.1 * weights


def test_of_such_a_draft_too_one_sentence_says_why_it_cannot_be_one(
    model: LocalModel, tmp_path: Path
) -> None:
    option = tiny_draft("qwen3_next", tmp_path)
    with pytest.raises(DraftUnusable, match="cannot be a draft model: its layers keep states"):
        guesses_of(option, model, None)
    with pytest.raises(
        DraftUnusable, match=r"at most half of --memory is for a draft: \d+ bytes are missing"
    ):
        guesses_of(SERVED, model, 40_000_000)
    (Path(option) / "model.safetensors.index.json").unlink()
    with pytest.raises(DraftUnusable, match="no weights"):
        guesses_of(option, model, None)
    (Path(option) / "tokenizer.json").write_text("{}")
    with pytest.raises(DraftUnusable, match="another tokenizer"):
        guesses_of(option, model, None)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("off", ()),
        ("lookup", ("lookup",)),
        ("auto", ("lookup", "tables")),
        (DRAFT, ("lookup", "tables", DRAFT[7:])),
    ],
)
def test_what_a_peer_guesses_with_is_what_it_announces(
    option: str, names: tuple[str, ...], model: LocalModel
) -> None:
    guesses, taken_bytes = guesses_of(option, model, None)
    announced = () if guesses is None else guesses.announced
    assert tuple(draft.name for draft in announced) == names
    assert (taken_bytes > 0) == (option == DRAFT)
    tokenizer = bytes.fromhex(model.manifest.files["tokenizer.json"])[:8]
    measured = [(draft.tokenizer, draft.guess_ms > 0) for draft in announced if draft.tokenizer]
    assert measured == [(tokenizer, True)] * (option == DRAFT)
