"""Multi-head latent attention to latents as they are kept: the matrix that would expand them to keys multiplies queries
instead, and the one that would expand them to values multiplies the result (DeepSeek-V2, 2024, section 2.1.2)."""

from typing import Any

import torch
from torch import Tensor, nn

from molink.shards.matrices.quantized_matrices import QuantizedMatrices
from molink.shards.paged_attention.paged import BlockAddresses, NotPaged, PagedLatentAttention


def attend_latents(
    attention: PagedLatentAttention,
    module: Any,  # noqa: ANN401 - an architecture's attention
    query: Tensor,
    places: BlockAddresses,
    slot: int,
    scaling: float,
) -> Tensor:
    """Queries [1, heads, rows, dim], of which the last numbers are turned by their positions, as `module` made them;
    [1, heads, rows, value dim] as it would get them of its expanded keys and values. Raises NotPaged."""
    matrix = _expanding(module)
    heads, plain = query.shape[1], module.qk_nope_head_dim
    of_heads = matrix.view(heads, -1, matrix.shape[1])
    asked = torch.matmul(query[0, :, :, :plain], of_heads[:, :plain])
    attended = attention.attend(asked, query[0, :, :, plain:], places, slot, scaling)
    return torch.matmul(attended, of_heads[:, plain:].transpose(1, 2))[None]


def _expanding(module: Any) -> Tensor:  # noqa: ANN401 - an architecture's attention
    """[heads * (plain + value dim), rank]: what makes keys and values of latents."""
    linear = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or getattr(linear, "bias", None) is not None:
        raise NotPaged(f"{type(module).__name__} expands what it keeps in a way of its own")
    matrix = getattr(linear, "matrix", None)
    if isinstance(matrix, QuantizedMatrices):
        return matrix.unpacked()
    if not isinstance(linear, nn.Linear):
        raise NotPaged(f"{type(module).__name__} expands what it keeps by a {type(linear).__name__}")
    return linear.weight
