"""Traffic classes, and the share of an uplink that each is guaranteed. Pure."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class TrafficClass(IntEnum):
    """Traffic class of a frame; a lower number goes first."""

    DECODE = 0
    CONTROL = 1
    HANDOVER = 2
    """A KV cache on its way to where the decode goes on; a user waits for it."""
    PREFILL = 3
    REPLICATION = 4
    """A KV cache's second copy; nobody waits for it."""
    WEIGHTS = 5


DEFAULT_SHARES: Mapping[TrafficClass, float] = MappingProxyType(
    {
        TrafficClass.CONTROL: 0.05,
        TrafficClass.HANDOVER: 0.15,
        TrafficClass.PREFILL: 0.15,
        TrafficClass.REPLICATION: 0.05,
        TrafficClass.WEIGHTS: 0.05,
    }
)
"""Guaranteed part of the bytes sent while the class waits. The rest, 0.55, is decode's if it needs it."""
