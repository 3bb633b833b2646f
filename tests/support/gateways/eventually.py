"""What a gateway hears of within a second: looked for again and again, with pauses in which it can hear of it.

The gateways of most tests are threads of the same process.
"""

import time
from collections.abc import Callable

from support.swarms.fake_swarm import DEADLINE_S

LOOKS_EVERY_S = 0.02


def eventually(holds: Callable[[], bool]) -> None:
    """Returns when it holds, or fails at the tests' deadline."""
    ends_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < ends_s, "it has not come about"
        time.sleep(LOOKS_EVERY_S)
