"""How much a layer keeps of a session beside keys and values, from what transformers' configuration classes say.

No torch here. A test compares this with what layers of each kind keep when they are run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

KEEPS_NO_KEYS: Final = frozenset({"linear_attention", "conv", "mlp", "moe"})
"""Types of layers, in transformers' words, that have no keys and values."""
_KEEPS_NO_STATE: Final = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "mlp", "moe"}
)


@dataclass(frozen=True, slots=True)
class StateSize:
    """Numbers that a layer keeps of one session, whatever its length."""

    in_model_type: int = 0
    """Last inputs of convolutions, mostly."""
    in_float32: int = 0
    """Recurrent states, mostly; at most so exact."""


Rule = Callable[[Any, str], StateSize]
"""From a configuration and the type of a layer."""


def state_sizes(config: Any) -> tuple[StateSize, ...]:  # noqa: ANN401 - any of transformers' configurations
    """Of each layer. A configuration that no rule knows is taken for one without states."""
    kinds = getattr(config, "layer_types", None) or ()
    if set(kinds) <= _KEEPS_NO_STATE:
        return (StateSize(),) * int(config.num_hidden_layers)
    rule = next((rule for keys, rule in _RULES if all(hasattr(config, key) for key in keys)), None)
    if rule is None:
        return (StateSize(),) * len(kinds)
    return tuple(StateSize() if kind in _KEEPS_NO_STATE else rule(config, kind) for kind in kinds)


def _gated_delta_net(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return StateSize((2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim)


def _delta_attention(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
    width = config.linear_num_heads * config.linear_head_dim
    return StateSize(3 * width * config.linear_conv_kernel_dim, width * config.linear_head_dim)


def _mamba2(names: Mapping[str, str]) -> Rule:
    def size(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
        groups, state = getattr(config, names["groups"]), getattr(config, names["state"])
        width = getattr(config, names["heads"]) * getattr(config, names["head_dim"])
        return StateSize((width + 2 * groups * state) * getattr(config, names["kernel"]), width * state)

    return size


def _mamba(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
    return StateSize(
        config.intermediate_size * config.conv_kernel, config.intermediate_size * config.state_size
    )


def _jamba(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
    width = config.mamba_expand * config.hidden_size
    return StateSize(width * config.mamba_d_conv, width * config.mamba_d_state)


def _short_convolution(config: Any, _kind: str) -> StateSize:  # noqa: ANN401 - as above
    return StateSize(config.hidden_size * config.conv_L_cache)


def _convolved_streams(config: Any, kind: str) -> StateSize:  # noqa: ANN401 - as above
    """Convolutions of keys and of values, and of what attention and MLP give."""
    local = "swa_" if kind == "hybrid_sliding" else ""
    keys = getattr(config, f"{local}num_key_value_heads") * getattr(config, f"{local}head_dim")
    return StateSize(in_float32=(2 * config.hidden_size + 2 * keys) * config.conv_kernel_size)


_RULES: Final[tuple[tuple[tuple[str, ...], Rule], ...]] = (
    (("linear_num_value_heads",), _gated_delta_net),
    (("linear_num_heads",), _delta_attention),
    (
        ("mamba_n_heads", "mamba_d_head"),
        _mamba2(
            {
                "heads": "mamba_n_heads",
                "head_dim": "mamba_d_head",
                "groups": "mamba_n_groups",
                "state": "mamba_d_state",
                "kernel": "mamba_d_conv",
            }
        ),
    ),
    (
        ("mamba_num_heads", "mamba_head_dim"),
        _mamba2(
            {
                "heads": "mamba_num_heads",
                "head_dim": "mamba_head_dim",
                "groups": "n_groups",
                "state": "ssm_state_size",
                "kernel": "conv_kernel",
            }
        ),
    ),
    (
        ("num_heads", "head_dim", "expand"),
        _mamba2(
            {
                "heads": "num_heads",
                "head_dim": "head_dim",
                "groups": "n_groups",
                "state": "state_size",
                "kernel": "conv_kernel",
            }
        ),
    ),
    (("state_size", "conv_kernel"), _mamba),
    (("mamba_dt_rank", "mamba_expand"), _jamba),
    (("conv_L_cache",), _short_convolution),
    (("swa_num_key_value_heads", "conv_kernel_size"), _convolved_streams),
)
"""What a configuration has to have, and what follows from it."""
