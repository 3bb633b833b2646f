"""The tokenizer against transformers' own, for every kind of tokenizer that causal language models have."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deadline import DEADLINE_S
from support.models.tiny_models import SENTENCES, make_tokenizer
from support.models.tokenizer_kinds import MAKERS, TEXTS, unigram
from support.properties import examples
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from molink.shards.text.tokenizer import Tokenizer, TokenizerError

relaxed = settings(deadline=None, max_examples=examples(60))


@pytest.fixture(scope="module", params=MAKERS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any, Path]:
    """(ours, transformers', folder) of one kind of tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param]().save_pretrained(folder)
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder), folder


Both = tuple[Tokenizer, Any, Path]


CHAT = [
    {"role": "system", "content": "You are a poet.", "name": None},
    {"role": "user", "content": "Speak, \N{SNOWMAN}!"},
]


@relaxed
@given(text=TEXTS)
def test_encoding_and_decoding_equal_those_of_transformers(both: Both, text: str) -> None:
    ours, reference, _ = both
    expected = reference(text).input_ids

    assert ours.encode(text) == tuple(expected)
    assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_vocabulary_size_and_single_tokens_equal_those_of_transformers(both: Both) -> None:
    ours, reference, _ = both

    assert ours.vocabulary_size == len(reference)
    for token_id in range(ours.vocabulary_size):
        assert ours.has_text(token_id) == (token_id not in reference.all_special_ids)
        assert ours.token_text(token_id) == reference.decode([token_id], clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_chat_templates_give_the_tokens_of_transformers(
    kind: str, add_generation_prompt: bool, tmp_path: Path
) -> None:
    MAKERS[kind]().save_pretrained(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(
        CHAT, add_generation_prompt=add_generation_prompt, return_dict=False
    )

    got = Tokenizer.from_folder(tmp_path).apply_chat_template(CHAT, add_generation_prompt)
    assert got == tuple(expected)


def test_a_chat_template_inside_the_configuration_is_used(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = [
        {"name": "default", "template": "{{ bos_token }}x"},
        {"name": "rag", "template": "y"},
    ]
    tokenizer.save_pretrained(tmp_path, save_jinja_files=False)
    reference = AutoTokenizer.from_pretrained(tmp_path)

    ours = Tokenizer.from_folder(tmp_path).apply_chat_template(CHAT)
    assert ours == tuple(reference.apply_chat_template(CHAT, return_dict=False))


def _with_template(template: str, folder: Path) -> Tokenizer:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set n = namespace(__class__=1) %}", "underscore"),
        ("{{ messages[7].role.upper() }}", "refuses these messages"),
        ("{% for i in range(10000) %}{{ 'x' * 10000 }}{% endfor %}", "characters"),
    ],
)
def test_a_template_that_fails_or_misbehaves_is_refused_with_its_reason(
    template: str, sentence: str, tmp_path: Path
) -> None:
    tokenizer = _with_template(template, tmp_path)

    with pytest.raises(TokenizerError, match=sentence):
        tokenizer.apply_chat_template(CHAT)


def test_a_template_that_is_no_jinja_is_refused_when_the_tokenizer_is_read(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="not valid"):
        _with_template("{% if %}", tmp_path)


def test_a_model_without_chat_template_says_so(tmp_path: Path) -> None:
    unigram().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)

    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)


def test_an_empty_chat_and_messages_that_are_not_json_are_refused(tmp_path: Path) -> None:
    tokenizer = _with_template("x", tmp_path)

    with pytest.raises(TokenizerError, match="at least one message"):
        tokenizer.apply_chat_template([])
    with pytest.raises(TokenizerError, match="JSON"):
        tokenizer.apply_chat_template([{"role": "user", "content": object()}])


def test_tokens_that_only_the_configuration_names_get_the_ids_of_transformers(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    configuration = json.loads((tmp_path / "tokenizer_config.json").read_text())
    configuration["pad_token"] = "<pad>"  # noqa: S105
    configuration["image_token"] = "<image>"  # noqa: S105
    configuration["added_tokens_decoder"] = {
        "385": {"content": "<two>", "special": False, "normalized": False},
        "384": {"content": "<one>", "special": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(configuration))
    reference, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    text = "a<one>b<two> c<pad><image></s>"

    assert ours.encode(text) == tuple(reference(text).input_ids)
    assert ours.decode(ours.encode(text)) == reference.decode(ours.encode(text), skip_special_tokens=True)


def test_a_model_with_vocabulary_and_merges_only_is_converted(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    make_tokenizer().save_pretrained(whole)
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    files = {
        "vocab.json": json.dumps(model["vocab"]).encode(),
        "merges.txt": "\n".join(" ".join(pair) for pair in model["merges"]).encode(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}
        ).encode(),
    }

    ids = Tokenizer.from_folder(whole).encode(SENTENCES[0])
    assert Tokenizer.from_files(files).encode(SENTENCES[0]) == ids


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"tokenizer.json": b"{"}, "damaged"),
        ({"tokenizer.json": b"\xff"}, "damaged"),
        ({"tokenizer_config.json": b"[]"}, "not a JSON object"),
        ({"tokenizer_config.json": b"{}"}, "no tokenizer can be made"),
        ({"../evil": b""}, "not the name"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(files: dict[str, bytes], sentence: str) -> None:
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.from_files(files)


@settings(deadline=None, max_examples=examples(40))
@given(at=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_flipped_byte_in_a_tokenizer_file_never_gives_another_error(at: int, byte: int) -> None:
    data = bytearray(_TOKENIZER_JSON)
    data[at % len(data)] = byte
    try:
        tokenizer = Tokenizer.from_files({"tokenizer.json": bytes(data)})
    except TokenizerError:
        return
    assert tokenizer.vocabulary_size > 0


_TOKENIZER_JSON = make_tokenizer().backend_tokenizer.to_str().encode()


def test_an_empty_folder_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_using_a_tokenizer_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    program = (
        "import sys; from pathlib import Path; from molink.shards.text.tokenizer import Tokenizer, TextStream\n"
        "t = Tokenizer.from_folder(Path(sys.argv[1])); s = TextStream(t)\n"
        "text = ''.join(map(s.push, t.apply_chat_template([{'role': 'user', 'content': 'hi'}])))\n"
        "print(text, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.split("\n")[-2].endswith("False False")


def test_added_tokens_keep_their_flags() -> None:
    backend = Backend(models.BPE())
    backend.add_tokens([AddedToken("<keep>", special=False), AddedToken("<drop>", special=True)])
    tokenizer = Tokenizer.from_files({"tokenizer.json": backend.to_str().encode()})

    assert tokenizer.decode(tokenizer.encode("<keep><drop>")) == "<keep>"
