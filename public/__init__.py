"""MoLink swarm: volunteers' GPUs, pooled into one fast language model.

The names below are loaded on first use, so that `import molink` costs nothing and brings in no torch,
libp2p or grpc.
"""

from typing import TYPE_CHECKING

from molink.lazy_names import lazy_names

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
    from molink.shards.grammar import Grammar
    from molink.shards.spec import SamplingParams

    __version__: str

__all__ = [
    "AsyncSwarm",
    "Generation",
    "Grammar",
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

_load = lazy_names(
    __name__,
    {
        "client.api.blocking": ("Swarm",),
        "client.api.generation": ("Generation", "Hop"),
        "client.api.swarm": ("AsyncSwarm",),
        "client.errors": (
            "InvalidRequest",
            "ModelNotFound",
            "NoCircuit",
            "PeerLost",
            "SwarmError",
            "SwarmUnavailable",
        ),
        "shards.grammar": ("Grammar",),
        "shards.spec": ("SamplingParams",),
    },
)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("molink")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
