"""The Triton kernels in Triton's interpreter, beside float64:
`TRITON_INTERPRET=1 python tests/gpu/kernels/kernel_interpreter.py`.

Prints one JSON line: how many calls were compared, the largest difference of each dtype, and every fault.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.kernels.kernel_shapes import HEAD_DIMS, TOLERANCES, compared, shapes
from gpu.kernels.latent_shapes import latent_cases
from gpu.kernels.layer_shapes import byte_cases, layer_cases

LONGEST = 700
"""The interpreter computes one program after the other: the full 32,000 tokens are a card's."""


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
    parser.add_argument("--processors", type=int, nargs="+", default=(1, 132))
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--layers", action="store_true", help="norms, gates and products with bytes instead")
    parser.add_argument("--small", action="store_true", help="the smaller ones of these")
    options = parser.parse_args()
    compute_bfloat16()
    torch.set_num_threads(1)
    found = _layers(small=options.small) if options.layers else _attention(options)
    print(json.dumps(found))


def _layers(*, small: bool) -> dict[str, object]:
    from molink.shards.kernels.triton_bytes import TritonBytes
    from molink.shards.kernels.triton_latents import TritonLatents
    from molink.shards.kernels.triton_layers import TritonLayers

    cases = [*layer_cases(TritonLayers(), "cpu", small=small)]
    for processors in (1, 132):
        cases += byte_cases(TritonBytes(processors, 64 << 10), "cpu", small=small)
        cases += latent_cases(
            TritonLatents(processors, 227 << 10), "cpu", 40 if small else 300, (*TOLERANCES,)
        )
    most: dict[str, float] = {}
    faults: list[str] = []
    for case in cases:
        found = case()
        most[found.dtype] = max(most.get(found.dtype, 0.0), found.difference)
        faults += found.faults
    return {"compared": len(cases), "most": most, "faults": faults}


def _attention(options: argparse.Namespace) -> dict[str, object]:
    from molink.shards.paged_attention.paged_triton import TritonAttention

    most: dict[str, float] = {}
    faults: list[str] = []
    count = 0
    for processors in options.processors:
        attention = TritonAttention(processors)
        for shape in shapes(options.longest, tuple(options.head_dims)):
            found = compared(attention, shape, "cpu")
            most[shape.dtype] = max(most.get(shape.dtype, 0.0), found.difference)
            faults += [f"{processors} processors, {fault}" for fault in found.faults(shape)]
            count += 1
    return {"compared": count, "most": most, "faults": faults}


if __name__ == "__main__":
    main()
