"""Layout of a model over devices, and lengths of a request: the arguments of volumes and predictions. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Devices in pipeline stages of equal tensor parallelism."""

    tensor: int = 1
    """Ranks that share every layer of a stage (t in the communication-patterns paper)."""
    pipeline: int = 1
    """Stages, each with its share of the layers (p)."""

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1:
            raise ValueError(f"a layout has at least one rank and one stage, got {self}")

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        return f"TP={self.tensor} PP={self.pipeline}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request: the prompt's tokens (S_p) and those generated (S_d), of which the prefill draws the first."""

    prefill_tokens: int
    decode_tokens: int

    def __post_init__(self) -> None:
        if self.prefill_tokens < 1 or self.decode_tokens < 1:
            raise ValueError(f"a request has at least one token of prompt and one of output, got {self}")

    @property
    def forwarded_tokens(self) -> int:
        """Rows that pass through the layers: the last token generated does not (S_p + S_d - 1)."""
        return self.prefill_tokens + self.decode_tokens - 1
