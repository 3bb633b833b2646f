"""Which model a peer serves and in which numbers, as far as its owner leaves that open. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from molink.dht.records.records import PeerView, ServedModel
from molink.peer.device.thread_choice import AS_FAST
from molink.shards.spec import DTYPE_BYTES, ModelSpec, Span, missing_spans

TOKENIZERS = frozenset(
    {
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "sentencepiece.bpe.model",
        "spiece.model",
    }
)
"""Files of which one is enough for a tokenizer, or nearly so."""
FIRST_MODEL = "molink/tiny-shakespeare"
"""What a new swarm serves if nobody says."""
HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def agreeing(views: Sequence[PeerView], dtype: str, quantization: str | None) -> list[PeerView]:
    """The peers that compute in what was said, as far as anything was."""
    return [
        view
        for view in views
        if dtype in ("auto", view.facts.model.dtype) and quantization in (None, view.facts.model.quantization)
    ]


def most_needed(views: Sequence[PeerView]) -> ServedModel | None:
    """The model, in certain numbers, of which the most layers have the fewest holders; None where nothing is served.

    What a single peer says is served does not count where several say something else.
    """
    by_hash: dict[str, list[PeerView]] = {}
    for view in views:
        by_hash.setdefault(view.facts.model.model_hash, []).append(view)
    several = [model_hash for model_hash, holders in by_hash.items() if len(holders) > 1]

    def need(model_hash: str) -> tuple[float, int, str]:
        holders = by_hash[model_hash]
        whole = Span(0, holders[0].facts.model.layers)
        held = tuple(span for view in holders for span in view.state.spans)
        missing = sum(map(len, missing_spans(whole, held)))
        return (-missing / len(whole), len(holders), model_hash)

    chosen = min(several or by_hash, key=need, default=None)
    return None if chosen is None else by_hash[chosen][0].facts.model


@dataclass(frozen=True, slots=True)
class Choice:
    """What a peer serves whose owner has not said what."""

    model: str | None
    """The name of a model that comes with MoLink; None: the swarm serves others only, and the owner has to say."""
    served: ServedModel | None
    """In whose numbers; None: nobody serves it yet."""
    others: tuple[str, ...]
    """Names of what else is served, as far as they are such as hubs have, by how many say so. Nothing but a word of
    strangers: to be shown, never to be opened."""


def choose_model(
    views: Sequence[PeerView], bundled: Mapping[str, str], dtype: str, quantization: str | None
) -> Choice:
    """The model that the swarm needs most, of those whose contents this machine has and knows by their hash.

    Whoever announces something can give it any name: a folder of this machine, or what an attacker has put on a hub.
    So no name of an announcement is ever opened or fetched. `bundled`: the content hash of each by name.
    """
    by_content = {content_hash: name for name, content_hash in bundled.items()}
    own = [view for view in views if view.facts.model.content_hash in by_content]
    others = Counter(
        view.facts.model.name
        for view in views
        if view.facts.model.content_hash not in by_content and HUB_ID.fullmatch(view.facts.model.name)
    )
    named = tuple(sorted(others, key=lambda name: (-others[name], name)))
    needed = most_needed(agreeing(own, dtype, quantization) or own)
    if needed is not None:
        return Choice(by_content[needed.content_hash], needed, named)
    return Choice(None if views else FIRST_MODEL, None, named)


@dataclass(frozen=True, slots=True)
class Numbers:
    """In which numbers a model is computed."""

    dtype: str
    """`auto`: its configuration's."""
    quantization: str

    def __str__(self) -> str:
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization}"


def choose_numbers(dtype: str, quantization: str | None, served: Sequence[ServedModel]) -> Numbers:
    """What is not said is as most peers have it who serve the same contents, and who agree with what is said.

    `dtype` auto and `quantization` None say nothing. `served` is what those peers serve, one entry for each.
    """
    agreeing = Counter(
        Numbers(one.dtype, one.quantization)
        for one in served
        if dtype in ("auto", one.dtype) and quantization in (None, one.quantization)
    )
    if not agreeing:
        return Numbers(dtype, quantization or "none")
    return min(agreeing, key=lambda numbers: (-agreeing[numbers], numbers.dtype, numbers.quantization))


def fastest_dtype(decode_ms: Mapping[str, float], own: str) -> str:
    """The dtype in which a device decodes fastest; of those as fast, the model's `own`, else the smallest.

    `decode_ms` are positive, by dtype, at least one. A peer must not choose by it: in other numbers than the rest of
    its swarm it is of use to nobody. Who founds a swarm may.
    """
    limit_ms = AS_FAST * min(decode_ms.values())
    fast = [dtype for dtype, taken_ms in decode_ms.items() if taken_ms <= limit_ms]
    return own if own in fast else min(fast, key=lambda dtype: (DTYPE_BYTES[dtype], dtype))


def warn_of_other_numbers(name: str, numbers: Numbers, served: Sequence[ServedModel]) -> str | None:
    """A sentence for the owner of a peer whose numbers nobody else has: circuits never mix them. None: all is well."""
    others = sorted({str(Numbers(one.dtype, one.quantization)) for one in served})
    if not others or str(numbers) in others:
        return None
    return (
        f"{name} is served in {'; '.join(others)} here, and this peer adds it in {numbers}: circuits do not mix them, "
        "so it is of use once peers like it hold all layers. Leave out --quantization and --dtype to join the others"
    )


def model_notes(spec: ModelSpec, views: Sequence[PeerView], files: Collection[str]) -> tuple[str, ...]:
    """What the owner should know of the model before it is served: sentences. `files` are those beside its weights."""
    served = [view.facts.model for view in views if view.facts.model.content_hash == spec.content_hash]
    notes = [warn_of_other_numbers(spec.name, Numbers(spec.dtype, spec.quantization), served)]
    if not any(file in TOKENIZERS for file in files):
        notes.append(
            f"{spec.name} has no tokenizer (tokenizer.json or tokenizer.model) in its folder. Peers need none, but "
            "nobody can turn text into its tokens until a peer has one: put it there and start again"
        )
    if Path(spec.name).expanduser().is_absolute():
        notes.append(
            f"the whole swarm sees this model's path as its name, {spec.name}: choose another with --model-name"
        )
    return tuple(note for note in notes if note is not None)


def ask_for_model(named: Sequence[str]) -> str:
    """What the owner has to type, where nothing that comes with MoLink is served."""
    served = f"this swarm serves {', '.join(named[:3])}" if named else "this swarm serves models of its own"
    typed = f"--model {named[0]}" if named else "--model and its id or folder"
    return (
        f"{served}, and no model that comes with MoLink. What others only say is not opened unasked: if you "
        f"know and trust it, start with {typed}"
    )
