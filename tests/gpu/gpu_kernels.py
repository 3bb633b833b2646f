"""The case `kernels`: paged attention beside float64."""

import time

from gpu_findings import CannotRun, Context, Findings
from gpu_machine import missing_modules
from kernel_shapes import TOLERANCES, compared, shapes

from molink.shards.paged import PagedAttention

LONGEST = 32_000
_RESERVE_S = 10.0


def kernels(context: Context, findings: Findings) -> None:
    """On a card all shapes; on a processor two head sizes in Triton's interpreter, or, without Triton, as the tests'
    reference computes them."""
    if context.small:
        interprets = not missing_modules(("triton",))
        attention = _interpreted() if interprets else _written_out()
        wanted = shapes(96, (64,)) if interprets else shapes(96, (64, 128))
        findings.note("kernels", "Triton's, interpreted" if interprets else "the reference: no Triton here")
    else:
        if missing_modules(("triton",)):
            raise CannotRun("this torch has no Triton: sessions attend one after the other")
        from molink.shards.decode import decoding_on

        decoding = decoding_on(context.device, records=False)
        assert decoding is not None
        attention, wanted = decoding.attention, shapes(LONGEST)
    deadline_s = time.monotonic() + context.budget_s - _RESERVE_S
    most = dict.fromkeys(TOLERANCES, 0.0)
    faults: list[str] = []
    left = list(context.share([str(index) for index in range(len(wanted))]))
    count = len(left)
    while left and time.monotonic() < deadline_s:
        shape = wanted[int(left.pop(0))]
        found = compared(attention, shape, context.device)
        faults += found.faults(shape)
        most[shape.dtype] = max(most[shape.dtype], found.difference)
    for dtype, difference in most.items():
        findings.bound(f"{dtype}: off by, of a row's largest", difference, "", TOLERANCES[dtype])
    findings.hold("shapes compared", not left, f"{count - len(left)} of {count}")
    findings.hold("shapes that are wrong", not faults, "; ".join(faults) or "none", faults=faults)


def _interpreted() -> PagedAttention:
    from kernel_interpreter import compute_bfloat16

    compute_bfloat16()
    from molink.shards.paged_triton import TritonAttention

    return TritonAttention(108)


def _written_out() -> PagedAttention:
    from paged_reference import WrittenOut

    return WrittenOut()
