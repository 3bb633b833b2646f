"""The Triton kernels in Triton's interpreter, beside float64:
`TRITON_INTERPRET=1 python tests/gpu/kernels/kernel_interpreter.py`.

Prints one JSON line: how many calls were compared, the largest difference of each dtype, and every fault.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.kernels.drawing_shapes import drawing_cases
from gpu.kernels.kernel_shapes import HEAD_DIMS, TOLERANCES, compared, paired_shapes, shapes
from gpu.kernels.latent_shapes import latent_cases
from gpu.kernels.layer_shapes import Case, byte_cases, layer_cases, row_cases

LONGEST = 32_000


class Card(NamedTuple):
    """What the tiles and splits of a card follow from."""

    processors: int
    shared_bytes: int


CARDS = (Card(1, 64 << 10), Card(8, 99 << 10), Card(132, 227 << 10))
"""Small tiles and one split a row; a few splits; as many as an H100 has, each a program that the interpreter computes
after the others."""


def compute_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, multiplies them as such, makes them of integers as such, and
    cuts numbers off where cards round to the nearest: here they are numbers."""
    import numpy as np
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, cast = builder.create_dot, builder.cast_impl

    def number(one: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if one.dtype.scalar != bfloat16:
            return one
        return handle((one.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: object, a: object, b: object, *others: object) -> object:
        return dot(self, number(a), number(b), *others)

    def cast_impl(self: object, one: interpreter.TensorHandle, wanted: object) -> object:
        if wanted.scalar != bfloat16:  # type: ignore[attr-defined] # a type of Triton's
            return cast(self, number(one), wanted)
        bits = np.ascontiguousarray(number(one).data, np.float32).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        not_a_number = (bits & 0x7FFFFFFF) > 0x7F800000
        return handle(np.where(not_a_number, bits >> 16 | 0x40, nearest).astype(np.uint16), bfloat16)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--cards", type=int, nargs="+", default=range(len(CARDS)), help="their numbers")
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--pairs", action="store_true", help="every two values together, not each shape")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument(
        "--layers", action="store_true", help="norms, gates, latents and products with bytes instead"
    )
    parser.add_argument("--drawing", action="store_true", help="kernels that draw tokens instead")
    parser.add_argument("--small", action="store_true", help="the smaller ones of these")
    options = parser.parse_args()
    compute_bfloat16()
    torch.set_num_threads(1)
    found = _cases(options) if options.layers or options.drawing else _attention(options)
    print(json.dumps(found))


def _cases(options: argparse.Namespace) -> dict[str, object]:
    cases = [*(_drawing(options) if options.drawing else _layers(options))]
    ours = cases[options.part :: options.parts]
    most: dict[str, float] = {}
    faults: list[str] = []
    for case in ours:
        found = case()
        most[found.dtype] = max(most.get(found.dtype, 0.0), found.difference)
        faults += found.faults
    return {"compared": len(ours), "of": len(cases), "most": most, "faults": faults}


def _drawing(options: argparse.Namespace) -> Iterator[Case]:
    from molink.shards.kernels.triton_drawing import TritonDrawing

    return drawing_cases(TritonDrawing(), "cpu", small=options.small)


def _layers(options: argparse.Namespace) -> Iterator[Case]:
    from molink.shards.kernels.triton_bytes import TritonBytes
    from molink.shards.kernels.triton_latents import TritonLatents
    from molink.shards.kernels.triton_layers import TritonLayers
    from molink.shards.kernels.triton_rows import TritonRows

    small = options.small
    yield from layer_cases(TritonLayers(), "cpu", small=small)
    yield from row_cases(TritonRows(), "cpu", small=small)
    for card in CARDS:
        yield from byte_cases(TritonBytes(*card), "cpu", small=small)
        yield from latent_cases(TritonLatents(*card), "cpu", 40 if small else 300, (*TOLERANCES,))


def _attention(options: argparse.Namespace) -> dict[str, object]:
    from molink.shards.paged_attention.paged_triton import TritonAttention

    cards = [CARDS[number] for number in options.cards]
    if options.pairs:
        wanted = paired_shapes(options.longest, cards)
    else:
        wanted = [*itertools.product(cards, shapes(options.longest, tuple(options.head_dims)))]
    ours = wanted[options.part :: options.parts]
    most: dict[str, float] = {}
    faults: list[str] = []
    for card, shape in ours:
        found = compared(TritonAttention(*card), shape, "cpu")
        most[shape.dtype] = max(most.get(shape.dtype, 0.0), found.difference)
        faults += [f"{card.processors} processors, {fault}" for fault in found.faults(shape)]
    return {"compared": len(ours), "of": len(wanted), "most": most, "faults": faults}


if __name__ == "__main__":
    main()
