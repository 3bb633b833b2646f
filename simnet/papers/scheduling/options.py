"""What texts of `molink-simnet schedule` mean."""

from collections.abc import Mapping
from dataclasses import replace

from molink.simnet.papers.scheduling.testbeds import GB, GPUS, TESTBEDS, Gpu


def parse_testbeds(text: str) -> tuple[int, ...]:
    """Numbers of testbeds, each once; raises ValueError with one sentence."""
    if text.strip() == "all":
        return tuple(TESTBEDS)
    known = {str(number): number for number in TESTBEDS}
    names = [name.strip() for name in text.split(",")]
    if not known.keys() >= set(names):
        raise ValueError(
            f"--testbed must be 1, 2, 3, 4 or all, several with commas between them, got {text!r}"
        )
    return tuple(dict.fromkeys(known[name] for name in names))


def parse_gpu_memory(text: str | None) -> Mapping[str, Gpu]:
    """The kinds of machines with the memory given for some of them; raises ValueError with one sentence."""
    kinds = {_plain(name): name for name in GPUS}
    gpus = dict(GPUS)
    for part in filter(None, (text or "").split(",")):
        name, _, amount = part.partition("=")
        kind = kinds.get(_plain(name))
        if kind is None:
            raise ValueError(f"--gpu-memory names {name.strip()!r}: the testbeds have {', '.join(GPUS)}")
        try:
            gigabytes = float(amount)
        except ValueError:
            raise ValueError(f"--gpu-memory must be like A100=40, got {part!r}") from None
        if not 0 <= gigabytes <= GB:
            raise ValueError(f"--gpu-memory of {kind} must be gigabytes, 0 or more, got {amount.strip()}")
        gpus[kind] = replace(gpus[kind], memory_bytes=int(gigabytes * GB))
    return gpus


def _plain(name: str) -> str:
    return "".join(name.split()).casefold()
