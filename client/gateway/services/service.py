"""Services and long-running operations as values: what can be wrong with them, and who may have how many circuits."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Self

from molink.client.api.peer_requirements import PeerRequirements

SERVICE_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""As a label in DNS."""
DEFAULT_TOKENS: Final = 2048
"""For which a circuit has room, or the model's whole context if that is less."""
MOST_CIRCUITS: Final = 32
"""A peer lends one gateway memory for so many."""
REMEMBERED_S: Final = 60.0
"""A demand counts for so long: circuits that were needed once are not formed anew for each burst."""
Parameters = Mapping[str, float | int | list[str]]


class ServiceExists(Exception):
    """The name is taken, by a service or by a model; the text is one sentence."""


class UnknownService(Exception):
    """There is no such service, or no such operation; the text is one sentence."""


class ServiceNotReady(Exception):
    """The service is there, and serves nothing now; the text is one sentence."""


class ServiceNotPossible(Exception):
    """The peers that are there cannot hold the service; the text says what is missing."""


class OperatorKeyMissing(Exception):
    """What was asked needs a key that may operate, and there is none; the text is one sentence."""


class ServiceState(StrEnum):
    """State that a service is in, or goes to: what is not finished is gone on with by the next gateway."""

    DEPLOYING = "deploying"
    RUNNING = "running"
    DELETING = "deleting"


class OperationKind(StrEnum):
    """Kind of operation."""

    DEPLOY = "deploy"
    DELETE = "delete"
    DRAIN = "drain"
    EXIT = "exit"
    SERVE = "serve"


class OperationState(StrEnum):
    """State of an operation."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpecification:
    """Specification of a service: what its operator asked for."""

    model: str
    """Name or hash of one that peers serve, or that comes with MoLink."""
    gpu: str = ""
    gpu_count: int = 0
    memory_bytes: int = 0
    regions: tuple[str, ...] = ()
    """These as `PeerRequirements` has them."""
    partners: str = "auto"
    minimum_circuits: int = 1
    """That stand in any case, each with a generation on it or held for one."""
    maximum_circuits: int = 4
    """Generations at once."""
    tokens_per_circuit: int | None = None
    """For which a circuit has room while it is held; None: DEFAULT_TOKENS."""
    parameters: Parameters = field(default_factory=dict)
    """Of requests, where these do not say."""

    @property
    def requirements(self) -> PeerRequirements:
        """What peers of its circuits must meet."""
        return PeerRequirements(self.gpu, self.gpu_count, self.memory_bytes, self.regions)

    def tokens(self, context_length: int) -> int:
        """Returns the tokens for which each circuit of it has room."""
        return min(context_length, self.tokens_per_circuit or DEFAULT_TOKENS)

    def to_json(self) -> str:
        """Returns it as the database keeps it."""
        return json.dumps(asdict(self) | {"parameters": dict(self.parameters)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns what `to_json` wrote; fields of a newer version are left out."""
        known = {field.name for field in fields(cls)}
        told: dict[str, Any] = {name: value for name, value in json.loads(text).items() if name in known}
        return cls(**told | {"regions": tuple(told.get("regions", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Service as the database has it. Times are seconds since 1970 (UTC)."""

    name: str
    specification: ServiceSpecification
    state: ServiceState
    operation_id: str
    """That brought it into this state."""
    cancels: bool
    """Whether somebody wants that operation undone."""
    created_at_s: float
    running_since_s: float | None
    owner_id: str
    """The gateway that holds its circuits; empty: none does."""
    observed: Mapping[str, Any]
    """What that one has last said of it."""

    @property
    def work(self) -> tuple[str, ServiceState, str, bool]:
        """What its owner does: when it changes, it does something else."""
        return self.name, self.state, self.operation_id, self.cancels


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRunningOperation:
    """Operation: something that takes long, and is gone on with when a gateway starts again."""

    id: str
    kind: OperationKind
    subject: str
    """Name of the service, or id of the peer."""
    state: OperationState = OperationState.RUNNING
    message: str = ""
    """What is being done, or what became of it."""
    progress: float = 0.0
    """From 0 to 1."""
    cancels: bool = False
    created_at_s: float = 0.0
    updated_at_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Returns it JSON-ready."""
        return {
            "id": self.id,
            "object": "operation",
            "kind": self.kind,
            "subject": self.subject,
            "state": self.state,
            "message": self.message,
            "progress": round(self.progress, 3),
            "cancel_requested": self.cancels,
            "created_at": round(self.created_at_s, 3),
            "updated_at": round(self.updated_at_s, 3),
        }


@dataclass(slots=True)
class Scaling:
    """Scaling between a minimum and a maximum. Times are those of any one clock."""

    minimum: int
    maximum: int
    _peaks: list[tuple[float, int]] = field(default_factory=list)
    """Demands that no later one has reached, with the last time of each; the highest first."""

    def wanted(self, now_s: float, demand: int) -> int:
        """Returns how many circuits there should be, of which `demand` are in use or waited for now."""
        self._peaks = [peak for peak in self._peaks if peak[1] > demand and now_s - peak[0] < REMEMBERED_S]
        self._peaks.append((now_s, demand))
        return min(self.maximum, max(self.minimum, self._peaks[0][1]))


@dataclass(frozen=True, slots=True)
class CircuitDemand:
    """Demand of one gateway for circuits of a service."""

    in_use: int = 0
    """Generations under way."""
    waiting: int = 0
    """Generations that wait for a circuit."""
    idle: int = 0
    """Circuits that it holds, or forms, without a generation on them."""
    spare: int = 0
    """Circuits that it wants beside those in use and waited for, for generations to come."""

    @property
    def occupied(self) -> int:
        """Circuits that it has, whatever was granted."""
        return self.in_use + self.idle

    @property
    def is_nothing(self) -> bool:
        """Whether it has no circuit and wants none."""
        return not (self.in_use or self.waiting or self.idle or self.spare)


def circuit_shares(maximum: int, demands: Sequence[CircuitDemand]) -> list[int]:
    """Returns how many circuits each gateway may have, at most `maximum` together.

    Generations come first, each gateway's as far as all get as many (max-min fairness); what these leave is shared
    among spare circuits in the same way. What does not divide goes to the earlier ones.
    """
    needed = _fair_shares(maximum, [one.in_use + one.waiting for one in demands])
    spare = _fair_shares(maximum - sum(needed), [one.spare for one in demands])
    return [generations + kept for generations, kept in zip(needed, spare, strict=True)]


def granted_circuits(maximum: int, share: int, held_elsewhere: int) -> int:
    """Returns how many of its `share` a gateway can have now, while others have not yet given back what they hold
    beyond theirs."""
    return max(0, min(share, maximum - held_elsewhere))


def _fair_shares(amount: int, wanted: Sequence[int]) -> list[int]:
    """Divides an amount so that nobody gets more than is wanted, and who gets less than that gets as much as any."""
    shares = [0] * len(wanted)
    least_first = sorted(range(len(wanted)), key=lambda place: (wanted[place], -place))
    for at, place in enumerate(least_first):
        shares[place] = min(wanted[place], amount // (len(wanted) - at))
        amount -= shares[place]
    return shares
