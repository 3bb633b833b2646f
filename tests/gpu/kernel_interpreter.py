"""The Triton kernels in Triton's interpreter, beside float64: `TRITON_INTERPRET=1 python kernel_interpreter.py`.

Prints one JSON line: how many calls were compared, the largest difference of each dtype, and every fault.
"""

import argparse
import json

import torch
from kernel_shapes import HEAD_DIMS, compared, shapes

LONGEST = 700
"""The interpreter computes one program after the other: the full 32,000 tokens are a card's."""


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as 16-bit integers, and multiplies them as such: here `tl.dot` gets numbers."""
    import numpy as np
    from triton.language import bfloat16
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def number(handle: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if handle.dtype.scalar != bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def create_dot(self: object, a: object, b: object, *others: object) -> object:
        return dot(self, number(a), number(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--processors", type=int, nargs="+", default=(1, 132))
    parser.add_argument("--longest", type=int, default=LONGEST)
    options = parser.parse_args()
    multiply_bfloat16()
    torch.set_num_threads(1)
    from molink.shards.paged_triton import TritonAttention

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
    print(json.dumps({"compared": count, "most": most, "faults": faults}))


if __name__ == "__main__":
    main()
