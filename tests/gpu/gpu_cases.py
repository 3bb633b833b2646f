"""Which cases there are, what each needs and how long it may take. Pure."""

from dataclasses import dataclass

LOADER = ("transformers", "pydantic", "safetensors", "tokenizers", "accelerate")
"""What reads a model of a folder, to a device."""
QUANTIZER = (*LOADER, "bitsandbytes")
NETWORK = (*LOADER, "grpc", "libp2p", "trio", "cryptography", "xxhash", "highspy", "typer")
"""What a real peer and a client import."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that has to hold on a card."""

    name: str
    says: str
    """What has to hold, in a few words."""
    function: str
    """`module:function`, called with a Context and Findings."""
    budget_s: float
    """Of all its processes on a card, from their start; beyond it they are ended."""
    alone: bool
    """Whether it measures time, so that nothing else may use the card meanwhile."""
    needs: tuple[str, ...] = ("transformers",)
    """Modules without which it cannot run."""
    processes: int = 1
    """How many can share its work at most."""
    speed: bool = False
    """Whether its bars are an H100's or H200's: on another card they are told, and do not decide."""
    cards: int = 1
    """Of one machine. Where there are fewer it is told as not run, and does not decide unless it was asked for."""


CASES = (
    Case(
        "kernels",
        "attention, norms, gates, rotations and products with bytes are those of float64",
        "gpu.cases.gpu_kernels:kernels",
        150,
        alone=False,
        needs=(),
        processes=4,
    ),
    Case(
        "tests",
        "the tests of paged steps, prefixes, windows, swapping, pressure and pieces pass on the device",
        "gpu.cases.gpu_tests:existing_tests",
        200,
        alone=False,
        needs=(*LOADER, "pytest", "pytest_timeout", "hypothesis"),
    ),
    Case(
        "recorded",
        "recorded steps are unrecorded ones bit for bit",
        "gpu.cases.gpu_recording:recorded",
        90,
        alone=False,
        needs=LOADER,
    ),
    Case(
        "failing-capture",
        "a capture that fails leaves right steps and flat memory",
        "gpu.cases.gpu_recording:failing_capture",
        90,
        alone=False,
        needs=LOADER,
    ),
    Case(
        "architectures",
        "every kind of docs/MODELS.md is exact in three batchings, float32 and bfloat16",
        "gpu.cases.gpu_models:architectures",
        240,
        alone=False,
        needs=LOADER,
        processes=12,
    ),
    Case(
        "quantized",
        "int8 and nf4, dense and experts, are what they are on a processor",
        "gpu.cases.gpu_models:quantized",
        120,
        alone=False,
        needs=QUANTIZER,
    ),
    Case(
        "full-pool",
        "64 sessions in a full pool for a minute, never out of memory",
        "gpu.cases.gpu_pool:full_pool",
        120,
        alone=False,
        needs=LOADER,
    ),
    Case(
        "peers",
        "two real peers on one device generate transformers' tokens",
        "gpu.cases.gpu_peers:two_peers",
        120,
        alone=False,
        needs=NETWORK,
    ),
    Case(
        "ranks",
        "a peer on two cards generates transformers' tokens, its steps and their sums recorded",
        "gpu.cases.gpu_ranks:two_cards",
        120,
        alone=False,
        needs=NETWORK,
        cards=2,
    ),
    Case(
        "profile",
        "the profile predicts a step of the whole model",
        "gpu.cases.gpu_profile:prediction",
        90,
        alone=True,
        needs=LOADER,
    ),
    Case(
        "decode",
        "one session near the memory's floor, 64 well above it, rows together as apart",
        "gpu.cases.gpu_speed:decode",
        90,
        alone=True,
        speed=True,
    ),
    Case(
        "kernel-speed",
        "each kernel beside the operations that it stands for",
        "gpu.cases.gpu_kernels:kernel_speed",
        60,
        alone=True,
        needs=(),
        speed=True,
    ),
    Case(
        "prefill",
        "a long prompt near the card's own rate",
        "gpu.cases.gpu_speed:prefill",
        60,
        alone=True,
        speed=True,
    ),
    Case(
        "sampling", "64 rows with top_p drawn at once", "gpu.cases.gpu_speed:sampling", 45, alone=True, speed=True
    ),
    Case(
        "int8",
        "8-bit weights are multiplied as they are kept",
        "gpu.cases.gpu_speed:int8",
        90,
        alone=True,
        needs=LOADER,
        speed=True,
    ),
    Case(
        "hop",
        "a middle hop's clock is the device's, and its event loop never waits for it",
        "gpu.cases.gpu_hop:middle_hop",
        90,
        alone=True,
        needs=NETWORK,
    ),
)  # fmt: skip


def chosen(names: list[str] | None) -> tuple[Case, ...]:
    """Those of these names, in the order of the table; all without names.

    Raises:
        ValueError: there is no such case.
    """
    known = {case.name for case in CASES}
    unknown = sorted(set(names or ()) - known)
    if unknown:
        raise ValueError(f"there is no case {', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    return tuple(case for case in CASES if names is None or case.name in names)


def processes_for(case: Case, cores: int, memory_bytes: int | None) -> int:
    """How many processes share the case: none waits for a core, and each has 3 GB of the card (None: no card)."""
    if memory_bytes is None:
        return 1
    return max(1, min(case.processes, cores - 4, memory_bytes // 3_000_000_000))
