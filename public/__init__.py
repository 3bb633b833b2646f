"""MoLink swarm: volunteers' GPUs, pooled into one fast language model.

The names below are loaded on first use, so that `import molink` costs nothing and brings in no torch,
libp2p or grpc.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molink.client.api.blocking import Swarm
    from molink.client.api.generation import Generation, Hop
    from molink.client.api.swarm import AsyncSwarm
    from molink.client.errors import (
        InvalidRequest,
        ModelNotFound,
        NoCircuit,
        PeerLost,
        SwarmError,
        SwarmUnavailable,
    )
    from molink.shards.spec import SamplingParams

    __version__: str

_HOMES = {
    "AsyncSwarm": "molink.client.api.swarm",
    "Generation": "molink.client.api.generation",
    "Hop": "molink.client.api.generation",
    "InvalidRequest": "molink.client.errors",
    "ModelNotFound": "molink.client.errors",
    "NoCircuit": "molink.client.errors",
    "PeerLost": "molink.client.errors",
    "SamplingParams": "molink.shards.spec",
    "Swarm": "molink.client.api.blocking",
    "SwarmError": "molink.client.errors",
    "SwarmUnavailable": "molink.client.errors",
}

__all__ = [
    "AsyncSwarm",
    "Generation",
    "Hop",
    "InvalidRequest",
    "ModelNotFound",
    "NoCircuit",
    "PeerLost",
    "SamplingParams",
    "Swarm",
    "SwarmError",
    "SwarmUnavailable",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return version("molink")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'molink' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
