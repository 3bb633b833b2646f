"""Results of a generation, as values."""

from dataclasses import dataclass, field
from typing import Literal

from molink.client.text.tool_calls import ToolCall
from molink.routing.cost.terms import Term

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Hop:
    """Hop: layers [start, stop) on a peer."""

    peer_id: str
    start: int
    stop: int
    name: str = ""
    standby: str = ""
    """The peer that kept a copy of its KV cache at the end; empty: nobody."""
    copy_form: str = ""
    """In which that copy came: keys_and_values, inputs, token_ids."""
    copy_behind_tokens: int | None = None
    """That it lacked when it was looked at last; None: it was not looked at."""


@dataclass(frozen=True, slots=True)
class CircuitReport:
    """The circuit that served a generation, the last one if there were several."""

    hops: tuple[Hop, ...]
    predicted_tpot_ms: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery from the loss of a hop in mid-generation."""

    hop: Hop
    """The one that was lost."""
    seconds: float
    """From when the client knew of the loss to the next token."""
    recomputed_tokens: int
    """Of the sequence so far: those that hops computed once more."""
    by_standby: bool
    """Whether a peer with a copy of its KV cache took its place; else another circuit computed the sequence again."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability, and those of the most likely tokens at its place."""

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt with its log-probability, and those of the most likely tokens at its place."""

    token: str
    token_id: int
    logprob: float | None
    """Given the tokens before it; None for the first one, before which there are none."""
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished generation."""

    text: str
    """The new text only, without a stop string and without calls of tools."""
    token_ids: tuple[int, ...]
    """The new tokens only, a stop token included."""
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float
    """TTFT: seconds from the call to the first token, forming a circuit included."""
    tpot_s: float
    """TPOT: seconds from the first token to the last, over their number less one, as tokens came in, however late
    they were taken; 0 if there is only one. A mean: where guesses are right, several tokens come at once."""
    circuit: CircuitReport
    epochs: int = 1
    """Circuits that it took: 1, and one more for each failover."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """All of the prompt's tokens, where `prompt_logprobs` was asked for."""
    recoveries: tuple[Recovery, ...] = ()
    """One for each loss of a hop that tokens came after, in order."""
    cached_tokens: int = 0
    """Of the prompt: those whose keys and values every hop still had of an earlier one."""
    stop_string: str | None = None
    """The stop string that ended it, if one did."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model calls, of the tools that it was given."""
    trips: int = 0
    """Times round the circuit that brought tokens: each brings one, and those guesses that are right."""
    guessed_tokens: int = 0
    """Guesses that travelled."""
    accepted_tokens: int = 0
    """Those of them that became tokens of the generation."""

    @property
    def tokens_per_trip(self) -> float:
        """Mean over the trips; 0 if none is known."""
        return len(self.token_ids) / self.trips if self.trips else 0.0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text piece: a part of a generation as it streams. The last one has `finish_reason` and `generation`."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    generation: Generation | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that are complete with this piece."""
    prompt_logprobs: tuple[PromptToken, ...] = ()
    """With the first piece, as `Generation.prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class HopTimes:
    """Times of one hop, predicted and measured; medians over the decode steps, in milliseconds."""

    hop: Hop
    predicted_compute_ms: float
    measured_compute_ms: float
    measured_queue_ms: float
    predicted_link_ms: float
    """One way to the next hop."""
    measured_link_ms: float
    """Half the round trip that the link's own pings measure."""
    terms: tuple[Term, ...] = ()
    """What the router charged for this hop, in milliseconds per token; the predicted times are among them."""
    assumed: tuple[str, ...] = ()
    """What it had to assume, for nobody has measured it."""
    measured: tuple[str, ...] = ()
    """What is otherwise assumed and was measured here."""


@dataclass(frozen=True, slots=True)
class GuessCounts:
    """Guess counts: how many of a generation's guesses came from one source, and how many of these were right."""

    source: str
    """"lookup" in the text so far, "table" of the client's earlier generations, "prediction" of the client's, "draft"
    model, "grammar", or "other"."""
    guessed_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of where the time of a token goes."""

    generation: Generation
    hops: tuple[HopTimes, ...] = field(default=())
    predicted_tpot_ms: float = 0.0
    measured_tpot_ms: float = 0.0
    predicted_ttft_ms: float = 0.0
    measured_ttft_ms: float = 0.0
    """From the start of the ready circuit to the first token: without the time that the circuit took to form."""
    predicted_trip_ms: float = 0.0
    """Once round the circuit, without what guesses add."""
    predicted_tokens_per_trip: float = 1.0
    """That the router expects of the head's guesses; `predicted_tpot_ms` is what is left of a trip for a token."""
    why_no_guesses: str = ""
    """Why nothing was guessed, in a few words; empty: something was."""
    guess_sources: tuple[GuessCounts, ...] = ()
    """Where guesses came from, as far as the head says so, those first of which most became tokens."""

    @property
    def measured_trip_ms(self) -> float:
        """Mean time of a trip round the circuit, which brings a token, or with guesses several."""
        return self.measured_tpot_ms * max(1.0, self.generation.tokens_per_trip)

    @property
    def objective_ms(self) -> float:
        """Sum of what the circuit was charged, per token: the least among those that the router found."""
        return sum(term.ms for times in self.hops for term in times.terms)
