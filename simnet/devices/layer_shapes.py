"""Parts of layers that not every model has: experts, and keys and values kept as one latent. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture in place of the MLP: a router sends each row to some of many small MLPs."""

    count: int
    """E: experts of one layer."""
    active: int
    """k: those that compute a row."""
    intermediate_size: int
    """Of each expert."""
    shared: int = 0
    """Experts besides, of the same size, that compute every row."""
    dense_layers: int = 0
    """The model's first layers, which have an MLP instead."""
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not (1 <= self.active <= self.count and self.intermediate_size >= 1):
            raise ValueError(f"between 1 and all experts are active, got {self}")
        if self.shared < 0 or self.dense_layers < 0:
            raise ValueError(f"no number of experts or layers is negative, got {self}")

    def distinct(self, rows: int) -> float:
        """Experts that `rows` rows read together, on average, if each draws its k of the E alike and alone.

        E(1 - (1 - k/E)^rows): k of one row, nearly all of many. Routers prefer some experts, so that it is rather more
        than really are read.
        """
        return self.count * (1.0 - (1.0 - self.active / self.count) ** rows)

    def expert_parameters(self, hidden_size: int) -> int:
        """Gate, up and down projections of one expert."""
        return 3 * hidden_size * self.intermediate_size

    def router_parameters(self, hidden_size: int) -> int:
        return self.count * (hidden_size + (1 if self.router_bias else 0))


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent for all heads."""

    query_rank: int
    kv_rank: int
    """Numbers of the latent from which all keys and values are made."""
    rope_dim: int
    """Of a key that all heads share, which carries the position."""
    head_dim: int
    """Of each head's query and key, without position."""
    value_dim: int

    def __post_init__(self) -> None:
        if min(self.query_rank, self.kv_rank, self.rope_dim, self.head_dim, self.value_dim) < 1:
            raise ValueError(f"every size of a latent attention must be at least 1, got {self}")

    def parameters(self, hidden_size: int, heads: int) -> int:
        """Projections down to the latents and up from them, their norms, and the output projection."""
        query = (hidden_size + 1) * self.query_rank + self.query_rank * heads * (
            self.head_dim + self.rope_dim
        )
        down = hidden_size * (self.kv_rank + self.rope_dim) + self.kv_rank
        up = self.kv_rank * heads * (self.head_dim + self.value_dim)
        return query + down + up + heads * self.value_dim * hidden_size

    @property
    def cached_size(self) -> int:
        """Numbers that a token leaves in a layer's cache."""
        return self.kv_rank + self.rope_dim

    def operations_per_pair(self, heads: int) -> int:
        """For one row and one token that it attends to, queries having been projected to the latent, as in decoding."""
        return 2 * heads * (self.cached_size + self.kv_rank)
