# ruff: noqa: S106 - the tokens here are no passwords
"""One tokenizer of every kind that causal language models have, and texts to try them with."""

import json
from collections.abc import Callable

from hypothesis import strategies as st
from support.models.tiny_models import SENTENCES, make_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


TEMPLATE = """{%- if messages[0]['role'] == 'assistant' -%}
  {{- raise_exception('the assistant never speaks first') -}}
{%- endif -%}
{%- set state = namespace(count=0) -%}
{{- bos_token -}}
{% for message in messages %}
{%- if message.content is not defined -%}{%- continue -%}{%- endif -%}
{%- set state.count = state.count + 1 -%}
{% generation %}
[{{ state.count }}] {{ message.role }} ({{ message.name is defined }}): {{ message.content | tojson }}{{
eos_token }} {% endgeneration %} {% endfor %}
{%- if add_generation_prompt -%}assistant{{ ':' }} {% endif -%}"""


def _byte_level() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def _llama() -> PreTrainedTokenizerFast:
    """BPE as SentencePiece makes it: spaces are letters, unknown characters are bytes, the first space is
    dropped.
    """
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *BYTES], show_progress=False
    )
    backend.train_from_iterator(SENTENCES[:4], trainer)
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = raw["added_tokens"][:3]
    backend = Backend.from_str(json.dumps(raw))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )


def unigram() -> PreTrainedTokenizerFast:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="<unk>", clean_up_tokenization_spaces=True
    )


def _word_piece() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False
    )
    backend.train_from_iterator([*SENTENCES, "It isn't so, we've been; they're I'm 's ' . !"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        cls_token="[CLS]",
        clean_up_tokenization_spaces=True,
        additional_special_tokens=["<tool>", "<code>"],
    )


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": _byte_level,
    "llama": _llama,
    "unigram": unigram,
    "word_piece": _word_piece,
}


TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [*SENTENCES, "", " ", "  two  spaces ", "<s>special</s>", "don 't , go . 你好 👩‍👩‍👧", "<tool>x"]
    ),
    st.lists(st.sampled_from(["you", "'", " ", "re", "n't", ".", "!", "é", "🙂", "<s>"])).map("".join),
)
