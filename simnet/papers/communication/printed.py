"""What the communication-patterns paper prints of its runs: Tables III to VI, and the values of Figures 8 to 10 that
its text names. Prompts and answers have 128 tokens each."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.simnet.papers.communication.operations import Kind, Phase

LENGTHS = Lengths(128, 128)


@dataclass(frozen=True, slots=True)
class PrintedOperation:
    """One line of a table."""

    count: int
    shape: tuple[int, ...] | None = None
    message_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PrintedTimes:
    """Bars of Figures 8 to 10; None where the text does not say them."""

    latency_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None


Setting = tuple[str, Layout]
Lines = Mapping[tuple[Phase, Kind], PrintedOperation]


def _table_3(logits: int) -> Lines:
    return {
        ("prefill", "Allreduce"): PrintedOperation(65, (128, 4096)),
        ("prefill", "Gather"): PrintedOperation(1, (logits,)),
        ("decode", "Allreduce"): PrintedOperation(8255, (1, 4096)),
        ("decode", "Gather"): PrintedOperation(127, (logits,)),
    }


def _table_4(prefill: tuple[int, int], decode: tuple[int, int]) -> Lines:
    return {
        ("prefill", "Allreduce"): PrintedOperation(prefill[0], message_bytes=prefill[1]),
        ("decode", "Allreduce"): PrintedOperation(decode[0], message_bytes=decode[1]),
    }


def _table_5(prefill: int, decode: int) -> Lines:
    return {
        ("prefill", "Send"): PrintedOperation(prefill, (128, 4096)),
        ("prefill", "Recv"): PrintedOperation(prefill, (128, 4096)),
        ("decode", "Send"): PrintedOperation(decode, (1, 4096)),
        ("decode", "Recv"): PrintedOperation(decode, (1, 4096)),
    }


_TABLE_6: Lines = {
    ("prefill", "Allreduce"): PrintedOperation(33, (128, 4096)),
    ("prefill", "Gather"): PrintedOperation(1, (64128,)),
    ("prefill", "Allgather"): PrintedOperation(2, (128, 4096)),
    ("prefill", "Send"): PrintedOperation(2, (128, 2048)),
    ("prefill", "Recv"): PrintedOperation(2, (128, 2048)),
    ("decode", "Allreduce"): PrintedOperation(4191, (1, 4096)),
    ("decode", "Gather"): PrintedOperation(127, (64128,)),
    ("decode", "Allgather"): PrintedOperation(254, (1, 4096)),
    ("decode", "Send"): PrintedOperation(254, (1, 2048)),
    ("decode", "Recv"): PrintedOperation(254, (1, 2048)),
}
"""Its line Send/Recv stands for both."""

PRINTED_TABLES: Mapping[str, Mapping[Setting, Lines]] = MappingProxyType(
    {
        "III": {
            ("llama-3.1-8b", Layout(tensor=2)): _table_3(64128),
            ("llama-3.1-8b", Layout(tensor=4)): _table_3(32064),
        },
        "IV": {
            ("llama-3.2-3b", Layout(tensor=4)): _table_4((57, 786432), (7239, 6144)),
            ("llama-3.1-8b", Layout(tensor=4)): _table_4((65, 1048576), (8255, 8192)),
            ("llama-2-13b", Layout(tensor=4)): _table_4((81, 1310720), (10287, 10240)),
        },
        "V": {
            ("llama-3.1-8b", Layout(pipeline=2)): _table_5(2, 254),
            ("llama-3.1-8b", Layout(pipeline=4)): _table_5(6, 762),
        },
        "VI": {("llama-3.1-8b", Layout(2, 2)): _TABLE_6},
    }
)
"""By number. Table IV leaves the number of ranks open, on which it does not depend; four are Figure 4's."""

PRINTED_TIMES: Mapping[Setting, PrintedTimes] = MappingProxyType(
    {
        ("llama-3.2-3b", Layout(tensor=2)): PrintedTimes(0.31, 150, 1.17),
        ("llama-3.2-3b", Layout(tensor=4)): PrintedTimes(0.21, 90, 0.86),
        ("llama-3.2-3b", Layout(tensor=8)): PrintedTimes(1.52, 30, 11.56),
        ("llama-3.2-3b", Layout(pipeline=2)): PrintedTimes(0.69, 430, 2),
        ("llama-3.2-3b", Layout(pipeline=4)): PrintedTimes(1.36, 1110, 2),
        ("llama-3.2-3b", Layout(pipeline=8)): PrintedTimes(4.98, 2520, 19.22),
        ("llama-2-13b", Layout(tensor=8)): PrintedTimes(2.37, 70, 18),
        ("llama-2-13b", Layout(4, 2)): PrintedTimes(15.15, None, 103),
        ("llama-2-13b", Layout(2, 4)): PrintedTimes(None, None, None),
        ("llama-2-13b", Layout(pipeline=8)): PrintedTimes(None, 2430, None),
    }
)
"""Figures 8, 9 and 10. Four devices are a node, so that eight are two."""


def printed_operation(setting: Setting, phase: Phase, kind: Kind) -> PrintedOperation | None:
    """What one of the tables says of that operation; where two do, they agree."""
    found = [
        lines[setting][phase, kind]
        for lines in PRINTED_TABLES.values()
        if setting in lines and (phase, kind) in lines[setting]
    ]
    if not found:
        return None
    shape = next((one.shape for one in found if one.shape is not None), None)
    size = next((one.message_bytes for one in found if one.message_bytes is not None), None)
    return PrintedOperation(found[0].count, shape, size)
