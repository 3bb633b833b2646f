"""A tokenizer out of the files that models keep it in."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from molink.shards.checkpoint.model_files import TOKENIZER_FILES
from molink.shards.checkpoint.safetensors_header import StoreError, parse_json

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MOST_DECODER_STEPS: Final = 16
_MOST_GROWTH: Final = 16.0
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerError(ValueError):
    """The tokenizer's files are damaged or missing, or the model has no chat template for what was asked."""


def parse_backend(data: bytes) -> Backend:
    try:
        return Backend.from_str(data.decode())
    except BaseException as error:
        # The library reports bad files as plain Exception, and a panic inside it as a BaseException.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"tokenizer.json is damaged: {error}. Fetch the model again.") from error
        raise


def require_plain_decoder(files: Mapping[str, bytes]) -> None:
    """Refuses a tokenizer.json whose decoder could take long or write much, whatever the tokens are.

    Decoders run for every token, where nothing can interrupt them: what they replace is fixed text, not an expression,
    and becomes no more than a few times longer. Raises `TokenizerError`.
    """
    if "tokenizer.json" not in files:
        return
    decoder = _object(files, "tokenizer.json").get("decoder")
    steps = list(_decoder_steps(decoder, 0))
    growth = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern"), step.get("content")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            if not isinstance(text, str) or not text or not isinstance(content, str):
                raise TokenizerError("its decoder replaces what is no fixed text")
            growth *= max(1.0, len(content) / len(text))
    if len(steps) > _MOST_DECODER_STEPS or growth > _MOST_GROWTH:
        raise TokenizerError("its decoder could make far too much of a token")


def _decoder_steps(decoder: object, depth: int) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return
    if not isinstance(decoder, dict) or depth > _MOST_DECODER_STEPS:
        raise TokenizerError("its decoder is of no known form")
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    parts = decoder.get("decoders")
    for part in parts if isinstance(parts, list) else ():
        yield from _decoder_steps(part, depth + 1)


def read_settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """tokenizer_config.json, with what older models keep in special_tokens_map.json."""
    settings = _object(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= _object(files, "special_tokens_map.json")
    return settings


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        parsed = parse_json(files[name], name)
    except StoreError as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(parsed, dict):
        raise TokenizerError(f"{name} is not a JSON object. Fetch the model again.")
    return parsed


def token_content(value: object) -> object:
    """A special token as its text, whether it was written as such or with flags."""
    return value["content"] if isinstance(value, dict) and isinstance(value.get("content"), str) else value


def add_tokens(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json names but tokenizer.json lacks, in the order in which they get their
    ids.
    """
    listed = settings.get("added_tokens_decoder")
    decoder = listed if isinstance(listed, dict) else {}
    try:
        stated = [_added(decoder[key]) for key in sorted(decoder, key=int)]
    except (ValueError, TypeError, KeyError) as error:
        raise TokenizerError(f"tokenizer_config.json lists added tokens wrongly: {error}") from error
    by_text = {token.content: token for token in stated}
    special = [
        by_text.get(text) or AddedToken(text, special=True, normalized=False)
        for text in _special_texts(settings)
    ]
    present = backend.get_added_tokens_decoder().values()
    flags = {repr(token) for token in present}
    texts = {token.content for token in present}
    backend.add_tokens([token for token in stated if repr(token) not in flags])
    texts.update(by_text)
    backend.add_tokens([token for token in special if token.content not in texts])
    backend.add_special_tokens(special)


def _added(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(str(entry["content"]), **{flag: bool(entry[flag]) for flag in _FLAGS if flag in entry})


def _special_texts(settings: Mapping[str, Any]) -> list[str]:
    """Every token that the settings call special, once each."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    others = [name for name in settings if name.endswith("_token") and name not in NAMED_TOKENS]
    values: Iterable[object] = [
        *(settings.get(name) for name in NAMED_TOKENS),
        *(extra.values() if isinstance(extra, dict) else extra),
        *(settings[name] for name in others),
    ]
    texts = [token_content(value) for value in values]
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and text))


def template_source(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or an entry of tokenizer_config.json, maybe one of several."""
    if "chat_template.jinja" in files:
        try:
            return files["chat_template.jinja"].decode()
        except UnicodeDecodeError as error:
            raise TokenizerError("chat_template.jinja is not UTF-8. Fetch the model again.") from error
    stated = settings.get("chat_template")
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
    if isinstance(stated, dict):
        stated = stated.get("default")
    return stated if isinstance(stated, str) else None


def convert(files: Mapping[str, bytes]) -> Backend:
    """A tokenizer out of an older model's files (vocabulary and merges, SentencePiece), by transformers."""
    from transformers import AutoTokenizer

    unknown = files.keys() - set(TOKENIZER_FILES)
    if unknown:
        raise TokenizerError(f"{sorted(unknown)[0]!r} is not the name of a tokenizer's file.")
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            converted = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise TokenizerError(
                f"no tokenizer can be made of {', '.join(sorted(files))}: {error}. Models with "
                f"tokenizer.json always work."
            ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise TokenizerError("this model's tokenizer needs code of its own. Use a model with tokenizer.json.")
    return backend
