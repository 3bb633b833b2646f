"""What jitter does to the policy molink: late timers, stamps and acks make it slower, and never slower and slower."""

import pytest
from support.links.virtual_line import Conditions, VirtualUplink

from molink.peer.wire.transmission.classes import TrafficClass

LINE_BYTES_PER_S = 12.5e6
CHUNKS, CHUNK_BYTES, CHUNK_EVERY_S = 36, 200_000, 0.007
"""A prompt of 1,000 tokens as a head computes and sends it: 7.2 MB, which the line carries in 0.58 s."""
PROMPTS, PROMPT_EVERY_S = 6, 8.0


def taken_s(conditions: Conditions) -> list[float]:
    """Of each prompt: from its first chunk to the arrival of its last one."""
    line = VirtualUplink("molink", LINE_BYTES_PER_S, conditions)
    line.start()
    for number in range(PROMPTS * CHUNKS):
        prompt, chunk = divmod(number, CHUNKS)
        at_s = prompt * PROMPT_EVERY_S + chunk * CHUNK_EVERY_S
        line.at(at_s, lambda: line.push(0, TrafficClass.PREFILL, CHUNK_BYTES, b"prompt"))
    line.clock.run(PROMPTS * PROMPT_EVERY_S)
    delivered = line.links[0].delivered
    assert len(delivered) == PROMPTS * CHUNKS
    firsts, lasts = delivered[::CHUNKS], delivered[CHUNKS - 1 :: CHUNKS]
    return [last.at_s - first.pushed_s for first, last in zip(firsts, lasts, strict=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("ack_jitter_s", "arrival_jitter_s", "late_timer_s", "limit_s"),
    [(0.003, 0.003, 0.002, 0.8), (0.010, 0.005, 0.005, 1.0), (0.020, 0.010, 0.005, 2.0)],
)
def test_prompts_after_the_first_do_not_take_much_longer_than_the_line_does(
    ack_jitter_s: float, arrival_jitter_s: float, late_timer_s: float, limit_s: float, seed: int
) -> None:
    found = taken_s(
        Conditions(
            delay_s=0.03,
            ack_jitter_s=ack_jitter_s,
            arrival_jitter_s=arrival_jitter_s,
            late_timer_s=late_timer_s,
            seed=seed,
        )
    )
    assert max(found[2:]) < limit_s
