"""Which model a peer serves and in which numbers, as far as its owner leaves that open. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.dht.records import PeerView, ServedModel
from molink.peer.profiling.thread_choice import AS_FAST
from molink.shards.spec import DTYPE_BYTES, Span, missing_spans

FIRST_MODEL = "molink/tiny-shakespeare"
"""What a new swarm serves if nobody says."""


def agreeing(views: Sequence[PeerView], dtype: str, quantization: str | None) -> list[PeerView]:
    """The peers that compute in what was said, as far as anything was."""
    return [
        view
        for view in views
        if dtype in ("auto", view.facts.model.dtype) and quantization in (None, view.facts.model.quantization)
    ]


def most_needed(views: Sequence[PeerView]) -> ServedModel | None:
    """The model, in certain numbers, of which the most layers have the fewest holders; None where nothing is served."""
    if not views:
        return None
    by_hash: dict[str, list[PeerView]] = {}
    for view in views:
        by_hash.setdefault(view.facts.model.model_hash, []).append(view)

    def need(model_hash: str) -> tuple[float, int, str]:
        holders = by_hash[model_hash]
        whole = Span(0, holders[0].facts.model.layers)
        held = tuple(span for view in holders for span in view.state.spans)
        missing = sum(map(len, missing_spans(whole, held)))
        return (-missing / len(whole), len(holders), model_hash)

    return by_hash[min(by_hash, key=need)][0].facts.model


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
