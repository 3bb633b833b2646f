"""What the Triton kernels take of each card, compiled here for cards that are elsewhere:
`python tests/gpu/kernels/kernel_targets.py`.

Launches are those that the project makes, with the tiles that it chooses for the card. Prints one JSON line: what each
kernel takes at most on each card, and every limit that one is beyond.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.kernels.kernel_shapes import HEAD_DIMS
from gpu.kernels.pairs import pairwise
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from molink.shards.kernels import triton_bytes, triton_drawing, triton_latents, triton_layers, triton_rows
from molink.shards.kernels.fused import Activation, NormKind
from molink.shards.paged_attention import paged_triton
from molink.shards.paged_attention.paged import BlockAddresses, Logits, RotaryAngles
from molink.shards.sampling.drawing import Asked, LikelyTokens

KERNELS = {
    "_store": (paged_triton,),
    "_rotate_and_store": (paged_triton,),
    "_attend": (paged_triton,),
    "_merge": (paged_triton, triton_latents),
    "_store_latents": (triton_latents,),
    "_attend_latents": (triton_latents,),
    "_norm": (triton_layers,),
    "_gate": (triton_layers,),
    "_multiply": (triton_bytes,),
    "_multiply_row": (triton_rows,),
    "_largest": (triton_drawing,),
    "_lead": (triton_drawing,),
    "_race": (triton_drawing,),
    "_race_above": (triton_drawing,),
    "_settle": (triton_drawing,),
    "_race_of_likeliest": (triton_drawing,),
}
"""The modules that launch each by this name."""
LATENTS = (512, 64)
"""DeepSeek's, V2 and V3: numbers of a latent, and of the key beside it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Card:
    """What one program may have (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

    capability: int
    shared_bytes: int
    registers: int = 255
    """Of each thread; what does not fit is spilled to memory."""


CARDS = (
    Card(75, 64 << 10),
    Card(80, 163 << 10),
    Card(86, 99 << 10),
    Card(89, 99 << 10),
    Card(90, 227 << 10),
    Card(100, 227 << 10),
    Card(120, 99 << 10),
)
"""Turing (RTX 20), A100, RTX 30, RTX 40, H100 and H200, B200, RTX 50."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its arguments by name, and how it is compiled."""

    kernel: str
    arguments: Mapping[str, Any]
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a compiled kernel takes."""

    kernel: str
    case: str
    capability: int
    shared_bytes: int
    registers: int
    spilled_bytes: int

    def beyond(self, card: Card) -> list[str]:
        """The limits that it does not keep."""
        name = f"{self.kernel} of {self.case} for compute capability {self.capability / 10:.1f}"
        wrong = []
        if self.shared_bytes > card.shared_bytes:
            wrong.append(f"{name}: {self.shared_bytes} bytes of shared memory, at most {card.shared_bytes}")
        if self.registers > card.registers:
            wrong.append(f"{name}: {self.registers} registers, at most {card.registers}")
        return wrong


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """What would be launched meanwhile, in its place."""
    kept = {name: getattr(modules[0], name) for name, modules in KERNELS.items()}
    found: list[Launch] = []
    try:
        for name, kernel in kept.items():
            for module in KERNELS[name]:
                setattr(module, name, _Noting(name, kernel, found))
        yield found
    finally:
        for name, kernel in kept.items():
            for module in KERNELS[name]:
                setattr(module, name, kernel)


class _Noting:
    def __init__(self, name: str, kernel: Any, found: list[Launch]) -> None:  # noqa: ANN401 - Triton has no types
        self._name = name
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **keywords: object) -> None:
            names = self._kernel.arg_names
            given = dict(zip(names, arguments, strict=False))
            options = {name: value for name, value in keywords.items() if name not in names}
            given |= {name: value for name, value in keywords.items() if name in names}
            self._found.append(Launch(self._name, given, options))  # type: ignore[arg-type]

        return launch


def compiled(launch: Launch, kernel: Any, card: Card, case: str) -> Taken:  # noqa: ANN401 - as above
    """Compiles the launch for a card. Raises what Triton raises."""
    signature, constants, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = launch.arguments[name]
        if kernel.params[place].is_constexpr:
            signature[name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPE_NAMES[value.dtype]
            divisible[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not kernel.params[place].do_not_specialize:
                divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    target = GPUTarget("cuda", card.capability, 32)
    made = triton.compile(source, target=target, options=dict(launch.options))
    registers, spilled_bytes = _resources(made.asm["cubin"])
    return Taken(launch.kernel, case, card.capability, int(made.metadata.shared), registers, spilled_bytes)


_TYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.bool: "i1",
}


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as the disassembler that Triton brings along says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    registers, stack, local = (
        int(re.findall(rf"{name}:(\d+)", told)[-1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def attention_launches(
    card: Card, head_dim: int, dtype: torch.dtype, group: int, processors: int
) -> list[Launch]:
    """What a step of one row launches there, with plain logits and with others."""
    attention = paged_triton.TritonAttention(processors, card.shared_bytes)
    states = torch.zeros(1, 2, 1, head_dim, dtype=dtype)
    query = states.repeat(1, group, 1, 1)
    places = BlockAddresses(torch.zeros(1, 32, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    plain = Logits(head_dim**-0.5)
    with launches() as found:
        attention.store(states, states, places, 2)
        attention.rotate_and_store(RotaryAngles(query, states[:, 0], states[:, 0]), states, states, places, 2)
        for logits in (plain, plain._replace(softcap=50.0), plain._replace(sinks=query[0, :, 0, 0])):
            attention.attend(query, places, 2, 2, logits)
    return found


def latent_launches(card: Card, dtype: torch.dtype, heads: int, processors: int) -> list[Launch]:
    """What a step of one row launches there."""
    rank, dim = LATENTS
    attention = triton_latents.TritonLatents(processors, card.shared_bytes)
    latents, keys = torch.zeros(1, 1, 1, rank, dtype=dtype), torch.zeros(1, 1, 1, dim, dtype=dtype)
    places = BlockAddresses(torch.zeros(1, 64, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    with launches() as found:
        attention.store(latents, keys, places, 1)
        attention.attend(latents[0].repeat(heads, 1, 1), keys[0].repeat(heads, 1, 1), places, 1, 0.1)
    return found


def layer_launches(card: Card, dtype: torch.dtype, dim: int, processors: int) -> list[Launch]:
    """Norms and gates of this width, and products with bytes of few rows and of many."""
    layers = triton_layers.TritonLayers()
    bytes_ = triton_bytes.TritonBytes(processors, card.shared_bytes)
    states, weight = torch.zeros(3, dim, dtype=dtype), torch.zeros(dim, dtype=dtype)
    with launches() as found:
        for kind, added in itertools.product(NormKind, (None, states)):
            layers.norm(states, added, weight, 1e-6, kind)
        for activation in Activation:
            layers.gate(states, states, activation)
        for rows, columns in itertools.product((1, 17, 64), (512, 16384)):
            matrix = torch.zeros(columns, dim, dtype=torch.int8)
            bytes_.multiply(weight.expand(rows, dim).contiguous(), matrix, torch.zeros(columns), None)
        triton_rows.TritonRows().multiply(weight, torch.zeros(512, dim, dtype=dtype), None)
    return found


def drawing_launches(vocabulary: int, candidates: int) -> list[Launch]:
    """What two drawn rows launch."""
    drawing = triton_drawing.TritonDrawing()
    column = torch.ones(2, 1, dtype=torch.float64)
    asked = Asked(column, column, column, column.long(), column.long())
    logits = torch.zeros(2, vocabulary)
    order = LikelyTokens.of(logits, torch.arange(2), candidates, whole=True)
    with launches() as found:
        drawing.likeliest(logits)
        drawing.race(logits, asked)
        drawing.race_in_nucleus(logits, asked, column, column.long())
        drawing.race_of_likeliest(order, asked, column, vocabulary)
    return found


def _cases(options: argparse.Namespace, card: Card) -> Iterator[tuple[str, list[Launch]]]:
    attended: Iterable[tuple[int, str, int]]
    layered: Iterable[tuple[int, str]]
    attended = itertools.product(options.head_dims, options.dtypes, options.groups)
    layered = itertools.product(options.dims, options.dtypes)
    if options.pairs:
        of_cards = pairwise(CARDS, options.head_dims, options.dtypes, options.groups)
        attended = [(dim, dtype, group) for one, dim, dtype, group in of_cards if one is card]
        layered = [other for one, *other in pairwise(CARDS, options.dims, options.dtypes) if one is card]
    for head_dim, dtype, group in attended:
        case = f"{dtype}, heads of {head_dim}, {group} to a key"
        yield case, attention_launches(card, head_dim, getattr(torch, dtype), group, processors=108)
    for dtype in options.dtypes:
        yield f"{dtype}, latents", latent_launches(card, getattr(torch, dtype), 128, processors=108)
    for vocabulary, candidates in ((100, 4095), (128_256, 4095)):
        yield f"drawings from {vocabulary}", drawing_launches(vocabulary, candidates)
    for dim, dtype in layered:
        yield f"{dtype}, rows of {dim}", layer_launches(card, getattr(torch, dtype), dim, processors=108)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dims", type=int, nargs="*", default=HEAD_DIMS)
    parser.add_argument("--groups", type=int, nargs="+", default=(1, 3, 8))
    parser.add_argument("--dims", type=int, nargs="*", default=(128, 2048, 8192), help="widths of layers")
    parser.add_argument("--dtypes", nargs="+", default=[str(dtype)[6:] for dtype in DTYPES])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[card.capability for card in CARDS])
    parser.add_argument("--pairs", action="store_true", help="every two values together, not each shape")
    options = parser.parse_args()
    kernels = {name: getattr(modules[0], name) for name, modules in KERNELS.items()}
    taken: list[Taken] = []
    faults: list[str] = []
    cards = [card for card in CARDS if card.capability in options.capabilities]
    for card in cards:
        for case, found in _cases(options, card):
            for launch in found:
                one = compiled(launch, kernels[launch.kernel], card, case)
                taken.append(one)
                faults += one.beyond(card)
    summary: list[dict[str, object]] = []
    for card, kernel in itertools.product(cards, KERNELS):
        of_both = [one for one in taken if (one.capability, one.kernel) == (card.capability, kernel)]
        if of_both:
            most = {
                name: max(getattr(one, name) for one in of_both)
                for name in ("shared_bytes", "registers", "spilled_bytes")
            }
            summary.append(
                {"capability": card.capability, "kernel": kernel, "compiled": len(of_both), **most}
            )
    spilling = [asdict(one) for one in taken if one.spilled_bytes]
    print(json.dumps({"compiled": len(taken), "faults": faults, "most": summary, "spilling": spilling}))


if __name__ == "__main__":
    main()
