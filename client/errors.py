"""Errors between a client and a swarm. Each error has fields beside its sentence.

SwarmError
 ├── InvalidRequest      the caller's mistake: `parameter` names what to change; `code`
 ├── ModelNotFound       nobody serves it, and it is not found on this machine: `model`
 ├── SwarmUnavailable    no peer can be reached, or all that can are busy: `busy`, `late`,
 │                       `retry_after_s`
 ├── NoCircuit           the peers at hand do not cover the model: `missing_layers`, `missing_bytes`,
 │                       `refused_by`, `refusal`
 └── PeerLost            a peer of the circuit was lost and nobody could take over: `peer_id`, `span`, `reason`
"""

import re
from collections.abc import Sequence

from molink.dht.records.records import PeerView, ServedModel
from molink.routing import NoCircuit as NoCircuitFound
from molink.shards.spec import ModelSpec, Span

MOST_SAID = 200
_ADDRESS = re.compile(
    r"(?:ipv[46]:)?(?:\[[0-9A-Fa-f:.%]+\]|\b\d{1,3}(?:\.\d{1,3}){3})(?::\d{1,5})?"
    r"|/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/[^\s;,)]+"
)


def as_said(text: str) -> str:
    """Cleans what a peer or a library says, for an error: one printable line of bounded length, without addresses.

    Volunteers' addresses are nothing that the user of an API is to be told.
    """
    line = _ADDRESS.sub("an address", " ".join(text[: 4 * MOST_SAID].split()))
    printable = "".join(character if character.isprintable() else "?" for character in line)
    return printable if len(printable) <= MOST_SAID else f"{printable[: MOST_SAID - 1]}…"


class SwarmError(Exception):
    """Anything that a swarm could not do for its client."""


class InvalidRequest(SwarmError, ValueError):
    """The request cannot be served by any swarm as it stands.

    `code` is a word for programs, where they can do something about it: `no_chat_template`.
    """

    def __init__(self, detail: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(detail)
        self.parameter = parameter
        self.code = code


class ModelNotFound(SwarmError, LookupError):
    """The model is neither served by the swarm nor found on this machine."""

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"model {model!r} was not found: {detail}")
        self.model = model


class SwarmUnavailable(SwarmError):
    """No peer could be reached (`busy` is False), or those that could have no room now (True); or the time that was
    allowed for a circuit was over (`late`)."""

    def __init__(
        self, detail: str, *, busy: bool = False, late: bool = False, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(detail)
        self.busy = busy
        self.late = late
        self.retry_after_s = retry_after_s


class NoCircuit(SwarmError, NoCircuitFound):
    """The peers that are alive do not cover the model, and their free memory does not suffice to fill the gap.

    Where peers are left out because they refused or did not answer, `refused_by` is the last one, `refusal` its reason.
    """

    def __init__(
        self,
        model: str,
        peers: int,
        cause: NoCircuitFound,
        *,
        refused_by: str | None = None,
        refusal: str | None = None,
    ) -> None:
        NoCircuitFound.__init__(self, cause.detail, cause.missing_layers, cause.missing_bytes)
        self.model = model
        self.peers = peers
        self.refused_by = refused_by
        self.refusal = refusal

    def __str__(self) -> str:
        peers = "1 peer" if self.peers == 1 else f"{self.peers} peers"
        found = f"{self.model}, {peers} alive: {NoCircuitFound.__str__(self)}"
        if self.refused_by is None:
            return found
        return f"{found}; peer {self.refused_by} is left out for now: {self.refusal}"


class PeerLost(SwarmError):
    """A peer of the circuit was lost in mid-generation and no other circuit could be formed in time."""

    def __init__(self, peer_id: str, span: Span | None, reason: str) -> None:
        where = f" (layers {span})" if span is not None else ""
        super().__init__(f"peer {peer_id}{where} was lost: {reason}")
        self.peer_id = peer_id
        self.span = span
        self.reason = reason


def nobody_serves(spec: ModelSpec, views: Sequence[PeerView]) -> str:
    """Formats that nobody serves the model, and what is served instead, which may be what was meant."""
    others = {view.facts.model for view in views}
    names = ", ".join(sorted(map(_identity, others)))
    wanted = f"no peer that serves {_identity(spec)} is known yet"
    return f"{wanted}; the swarm serves {names}" if others else wanted


def _identity(model: ModelSpec | ServedModel) -> str:
    """Formats what must be equal for two peers to serve the same model."""
    packed = "" if model.quantization == "none" else f", {model.quantization}"
    return f"{model.name} in {model.dtype}{packed} (contents {model.content_hash[:12]})"


def in_short(problem: SwarmError) -> str:
    """Formats what stands in the way of a circuit for a line of progress; the whole sentence comes as the error."""
    layers = problem.missing_layers if isinstance(problem, NoCircuit) else ()
    lack = f": layers {', '.join(map(str, layers))} are missing" if layers else ""
    return f"no circuit yet{lack}; looking again"


def out_of_room(refused: SwarmError | None, said: tuple[str, str] | None) -> SwarmUnavailable:
    """What it means for a generation that was `refused` so, or not asked for, that peers have no room, of whom one has
    `said` so: its id, and what it said."""
    if isinstance(refused, SwarmUnavailable) and refused.busy:
        return refused
    return SwarmUnavailable(": ".join(said or ("there is no room",)), busy=True)
