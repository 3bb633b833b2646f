"""Text to tokens and back, as transformers does it, without importing transformers or torch.

`tokenizer.json` holds all of a tokenizer; the `tokenizers` library runs it. Only models without that file
need transformers, once, to convert what they have.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer as Backend

from molink.shards.checkpoint.model_files import TOKENIZER_FILES
from molink.shards.text.text_stream import StopMatcher, TextStream, clean_up_spaces
from molink.shards.text.tokenizer_files import (
    NAMED_TOKENS,
    TokenizerError,
    add_tokens,
    convert,
    parse_backend,
    read_settings,
    template_source,
    token_content,
)

if TYPE_CHECKING:
    from molink.shards.text.chat_template import ChatTemplate, Message

__all__ = ["StopMatcher", "TextStream", "Tokenizer", "TokenizerError", "read_files"]

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """One model's tokenizer and chat template. Immutable; several threads may use it at once."""

    def __init__(
        self, backend: Backend, settings: Mapping[str, Any], template: "ChatTemplate | None", chat_source: str
    ) -> None:
        """`settings` are those of tokenizer_config.json, special tokens as text. Use `from_folder` or
        `from_files`.
        """
        self._backend = backend
        self._template = template
        self.chat_source = chat_source
        """The chat template as the model's files have it; empty: it has none."""
        self._named = {name: settings[name] for name in NAMED_TOKENS if settings.get(name)}
        self.cleans_up_spaces = _cleans_up_spaces(backend, settings)
        """Whether `decode` removes spaces before punctuation."""
        added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_tokens = _byte_tokens(backend)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of the model in `folder`. Raises `TokenizerError` if there is none or a bad one."""
        return cls.from_files(read_files(folder))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], *, with_template: bool = True) -> "Tokenizer":
        """The tokenizer out of its files' contents by name, such as a peer hands them out.

        `with_template` False: the chat template is not even compiled, for whoever needs it somewhere else.

        Raises `TokenizerError` if tokenizer.json is damaged, or if without it nothing else makes a tokenizer.
        """
        settings = read_settings(files)
        if "tokenizer.json" in files:
            backend = parse_backend(files["tokenizer.json"])
            add_tokens(backend, settings)
        else:
            backend = convert(files)
        backend.no_truncation()
        backend.no_padding()
        source = template_source(files, settings)
        template = None if source is None or not with_template else _compiled(source)
        named = {name: token_content(value) for name, value in settings.items()}
        return cls(backend, named, template, source or "")

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of the text, with the special tokens that the model expects around it."""
        return tuple(self._backend.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""
        text = self.decode_raw(ids)
        return clean_up_spaces(text) if self.cleans_up_spaces else text

    def decode_raw(self, ids: Sequence[int]) -> str:
        """As `decode`, but spaces before punctuation stay."""
        return self._decoded(list(ids), skip_special_tokens=True)

    def decode_written(self, ids: Sequence[int]) -> str:
        """As `decode_raw`, with special tokens as they are written."""
        return self._decoded(list(ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """The text of a single token, special or not, as log-probabilities show it."""
        return self._decoded([token_id], skip_special_tokens=False)

    def _decoded(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """What the library makes of the ids; U+FFFD where it cannot make anything of them."""
        try:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            # a panic inside the library is a BaseException of no public type
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                return "\ufffd"
            raise

    def has_text(self, token_id: int) -> bool:
        """Whether `decode` makes anything of the token: it exists and is not special."""
        return token_id not in self._special and self._backend.id_to_token(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether it stands for one byte, to be joined with its neighbours into characters."""
        return token_id in self._byte_tokens

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so, special or not; None: there is none."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def apply_chat_template(
        self,
        messages: "Sequence[Message]",
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """The ids of a chat in the form that the model was trained on. Arguments as of `ChatTemplate.render`.

        Raises `TokenizerError` if the model has no chat template or the template refuses the messages.
        """
        if self._template is None:
            raise TokenizerError(
                "this model has no chat template, so it does not know who speaks. Use plain generation "
                "instead, or "
                "a model that was trained for chat."
            )
        from molink.shards.text.chat_template import ChatTemplateError

        try:
            text = self._template.render(
                messages,
                self._named,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
            )
        except ChatTemplateError as error:
            raise TokenizerError(str(error)) from error
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)


def _compiled(source: str) -> "ChatTemplate":
    """Jinja is imported where there is a template."""
    from molink.shards.text.chat_template import ChatTemplate, ChatTemplateError

    try:
        return ChatTemplate(source)
    except ChatTemplateError as error:
        raise TokenizerError(str(error)) from error


def read_files(folder: Path) -> dict[str, bytes]:
    """A folder's tokenizer files, contents by name. Raises `TokenizerError` if it has none."""
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if not files:
        raise TokenizerError(f"{folder} has no tokenizer, so text cannot be turned into tokens.")
    return files


def _cleans_up_spaces(backend: Backend, settings: Mapping[str, Any]) -> bool:
    """BPE tokenizers keep their spaces even if the settings say otherwise, unless they insist."""
    if not settings.get("clean_up_tokenization_spaces"):
        return False
    insists = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    return bool(insists) or type(backend.model).__name__ != "BPE"


def _byte_tokens(backend: Backend) -> frozenset[int]:
    """Ids of the tokens `<0x00>` to `<0xFF>`, if the decoder joins them into characters."""
    decoder = backend.decoder
    if decoder is None or "ByteFallback" not in json.dumps(json.loads(decoder.__getstate__())):
        return frozenset()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
