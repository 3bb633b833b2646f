"""Runs a freshly loaded span once, to learn what its layers cache and to refuse what packed batches would get
wrong."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.configuration_utils import PreTrainedConfig

from molink.shards.attention.attention import AttentionRules, attend_sequence, layer_number
from molink.shards.attention.rotations import Rotation
from molink.shards.checkpoint.stored_quantization import UnsupportedStorage, stored_quantization
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.kv.session_state import layouts_in
from molink.shards.model.text_backbone import text_config
from molink.shards.spec import Span

_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

_OWN_STATES: Final = "its layers keep states of sessions in a way of their own"
_TAKES_MORE: Final = "its layers take {} beside hidden states, and peers send hidden states only"
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("deepseek_v4", "minimax", "recurrent_gemma", "reformer", "rwkv", "unlimited_ocr_text", "xlstm"),
            _OWN_STATES,
        ),
        **dict.fromkeys(("zamba", "zamba2"), _TAKES_MORE.format("the embeddings")),
        "zaya": _TAKES_MORE.format("what the router of the layer before computed"),
        "hy_v4": _TAKES_MORE.format("what an earlier layer chose to attend to"),
        "inkling2_text": _TAKES_MORE.format("what earlier blocks of layers computed"),
        "diffusion_gemma": "it does not write one token after another",
        "trocr": "it decodes what an encoder saw, and only decoders by themselves are split over peers",
        "shieldgemma2": "it judges images and writes no text",
    }
)
"""Why architectures are refused of which no flag of a configuration says so."""
_STREAMS: Final = ("hc_mult", "hc_count")
"""How many residual streams go from layer to layer (hyper-connections, Zhu et al. 2024, section 2), if several."""


def config_refusal(config: PreTrainedConfig) -> str | None:
    """Why a model of this configuration cannot be served, or None."""
    try:
        stored_quantization(vars(config))
    except UnsupportedStorage as error:
        return str(error)
    encodes = getattr(config, "is_encoder_decoder", False)
    known = _REFUSED.get(config.model_type, "")
    config = text_config(config)
    known = known or _REFUSED.get(config.model_type, "")
    refusals = (
        (encodes, "it is an encoder-decoder, and only decoders are split over peers"),
        (known, known),
        (
            getattr(config, "num_hidden_layers", None) is None,
            "its configuration does not say how many layers its decoder has",
        ),
        (getattr(config, "hidden_size_per_layer_input", None), _TAKES_MORE.format("the token ids")),
        (
            any(getattr(config, name, 1) > 1 for name in _STREAMS),
            "its layers pass several residual streams to each other, and peers send one hidden state a token",
        ),
        (
            getattr(config, "num_kv_shared_layers", None),
            "its last layers use keys and values of others, which may be on another peer",
        ),
        (
            getattr(config, "cross_attention_layers", None),
            "its layers that look at images keep no keys and values of text",
        ),
    )
    return next((reason for holds, reason in refusals if holds), None)


def other_layers(config: PreTrainedConfig) -> list[str]:
    """The types of its layers that are not plain attention, and may keep a state other than keys and values."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENTION_TYPES))


def rope_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The parameters of rotary positions: one set, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


class ProbeBatch(Cache):  # type: ignore[misc] # transformers has no types
    """A batch of one new sequence that remembers what each layer stored and how it attended."""

    bitwise = True

    def __init__(self, config: PreTrainedConfig, *, keeps_states: bool) -> None:
        """Only where it `keeps_states` may layers keep something else than keys and values, or nothing."""
        count = getattr(config, "number_of_conv_states", 1)
        layers = config.num_hidden_layers if keeps_states else 0
        super().__init__(layers=[LinearAttentionLayer(number_of_states=count) for _ in range(layers)])
        self._config = config
        self._keeps_states = keeps_states
        self._stored: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._index_dims: dict[int, int] = {}
        self._attended: dict[int, list[tuple[AttentionRules, bool, bool]]] = {}
        self._rotated: dict[int, tuple[tuple[Tensor, Tensor], Rotation]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self._stored.setdefault(layer_idx, []).append((key_states, value_states))
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self._index_dims[layer_idx] = indexer_key_states.shape[2] if self._keeps_states else 0
        return indexer_key_states

    def rotated(self, layer: int, turned: tuple[Tensor, Tensor], rotation: Rotation) -> None:
        """The layer has turned queries and keys by their positions."""
        self._rotated[layer] = turned, rotation

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        layer = layer_number(module)
        stored = self._stored.get(layer, [])
        if layer in self._rotated:
            turned, rotation = self._rotated.pop(layer)
            rotation.hands_on = query is turned[0] and key is turned[1] and stored[-1][0] is key
        same = bool(stored) and stored[-1][0] is key and stored[-1][1] is value
        causal = getattr(module, "is_causal", True)
        self._attended.setdefault(layer, []).append((rules, same, causal))
        return attend_sequence(query, key, value, rules)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0

    def rules_of(self, layer: int) -> AttentionRules | None:
        """How the layer attended, if it did once."""
        attended = self._attended.get(layer, [])
        return attended[0][0] if len(attended) == 1 else None

    def stored_by(self, layer: int) -> tuple[Tensor, ...]:
        """Keys and values that the layer stored last."""
        stored = self._stored.get(layer, [])
        return stored[-1] if stored else ()

    def refusal(self, span: Span, *, attends: bool) -> str | None:
        """Why the layers that ran cannot be served, or None. `attends`: whether attention was to go through this
        batch."""
        for layer in span:
            stored, attended = self._stored.get(layer, []), self._attended.get(layer, [])
            if not stored and self._keeps_states:
                continue
            if len(stored) != 1:
                return f"layer {layer} does not keep keys and values of its own"
            if not attends:
                continue
            if len(attended) != 1:
                return f"the attention of layer {layer} does not go through the attention interface"
            rules, _, causal = attended[0]
            if not causal:
                return f"layer {layer} looks at later tokens"
            if _window(self._config, layer) and rules.sliding_window is None:
                return f"layer {layer} limits its attention in a way that packed batches do not know"
        return None

    def layouts(self, span: Span) -> dict[int, LayerLayout]:
        """What each layer caches. Only where there is no refusal."""
        found: dict[int, LayerLayout] = {}
        for layer in span:
            states = layouts_in(self.layers[layer]) if self._keeps_states else ()
            if layer not in self._stored:
                found[layer] = LayerLayout(0, 0, 0, 0, torch.float32, expands=False, states=states)
                continue
            key, value = self._stored[layer][0]
            attended = self._attended.get(layer)
            rules, same, _ = attended[0] if attended else (None, True, None)
            window = (rules.sliding_window or None) if rules is not None else None
            found[layer] = LayerLayout(
                key.shape[1],
                key.shape[3],
                value.shape[1],
                value.shape[3],
                key.dtype,
                not same,
                window,
                self._index_dims.get(layer, 0),
                states,
            )
        return found


def _window(config: PreTrainedConfig, layer: int) -> bool:
    """Whether the configuration limits the layer's attention to a window."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return kinds[layer] in ("sliding_attention", "hybrid_sliding")
    limited = getattr(config, "sliding_window", None) is not None
    return limited and getattr(config, "use_sliding_window", True) is not False


def probe_input(hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Two rows of unremarkable hidden states."""
    return torch.linspace(-1.0, 1.0, 2 * hidden_size).view(1, 2, hidden_size).to(device=device, dtype=dtype)
