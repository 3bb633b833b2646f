"""The ways in which decode rows of many sessions can attend on a device, the fastest first."""

from enum import Enum

from molink.shards.batching.decode import Decoding, decoding_on


class DecodingWay(Enum):
    """How steps of many sessions are computed; each works where those before it may not."""

    FUSED = "Triton's kernels in recorded steps, fused ones among them"
    RECORDED = "Triton's kernels in recorded steps"
    LAUNCHED = "Triton's kernels, launched step by step"
    TORCH = "torch's own attention, session by session"


def decoding_in(way: DecodingWay, device: str) -> Decoding | None:
    """What `Engine` takes as its `decoding`, on a device of any kind: None where sessions attend one by one."""
    if way is DecodingWay.TORCH:
        return None
    return decoding_on(device, records=way is not DecodingWay.LAUNCHED, fuses=way is DecodingWay.FUSED)
