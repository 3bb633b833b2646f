"""The Llama models of the papers on communication and redundancy, as published configurations describe them. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from molink.simnet.model_shapes import ModelShape

LLAMA_3_2_3B = ModelShape(
    name="llama-3.2-3b",
    architecture="llama",
    layers=28,
    hidden_size=3072,
    intermediate_size=8192,
    heads=24,
    kv_heads=8,
    head_dim=128,
    vocabulary_size=128256,
    context_length=131072,
    dtype="bfloat16",
    tied=True,
)
LLAMA_3_1_8B = ModelShape(
    name="llama-3.1-8b",
    architecture="llama",
    layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary_size=128256,
    context_length=131072,
    dtype="bfloat16",
)
LLAMA_2_13B = ModelShape(
    name="llama-2-13b",
    architecture="llama",
    layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    heads=40,
    kv_heads=40,
    head_dim=128,
    vocabulary_size=32000,
    context_length=4096,
)
LLAMA_2_70B = ModelShape(
    name="llama-2-70b",
    architecture="llama",
    layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocabulary_size=32000,
    context_length=4096,
)
"""In FP16, which the redundancy paper serves."""

LLAMA_SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {shape.name: shape for shape in (LLAMA_3_2_3B, LLAMA_3_1_8B, LLAMA_2_13B, LLAMA_2_70B)}
)
