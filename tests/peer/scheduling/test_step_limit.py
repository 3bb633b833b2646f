"""A peer on a GPU takes longer steps where its profile says that they pay and its memory has room for them."""

from dataclasses import replace

import pytest
from support.swarms.lease_books import make_spec

from molink.dht.records.records import PrefillLatency
from molink.peer.memory.memory import workspace_bytes
from molink.peer.scheduling.prefill_window import WINDOW_BYTES
from molink.peer.scheduling.step_limit import MOST_STEP_MS, WORKSPACE_SHARE, longest_step
from molink.shards.spec import MAX_STEP_TOKENS

SPEC = make_spec()
AMPLE_BYTES = 10**13


def measured(**layer_ms: float) -> tuple[PrefillLatency, ...]:
    """By tokens, written as `t512`."""
    return tuple(PrefillLatency(int(name[1:]), each) for name, each in layer_ms.items())


SUBLINEAR = measured(t256=0.5, t512=0.6, t1024=0.8, t2048=1.2)


@pytest.mark.parametrize(
    ("latencies", "tokens"),
    [
        (SUBLINEAR, 2048),
        (SUBLINEAR[:3], 1024),
        (SUBLINEAR[:2], 512),
        ((), 512),
        (measured(t512=1.0, t1024=2.0, t2048=2.1), 512),
        (measured(t512=1.0, t1024=1.7, t2048=3.4), 1024),
    ],
)
def test_a_step_is_twice_as_long_as_long_as_a_token_of_it_takes_less(
    latencies: tuple[PrefillLatency, ...], tokens: int
) -> None:
    assert longest_step(SPEC, latencies, 0.0, AMPLE_BYTES) == tokens


def test_what_a_step_takes_whatever_its_length_counts() -> None:
    linear = measured(t512=1.0, t1024=2.0, t2048=4.0)
    assert longest_step(SPEC, linear, 0.0, AMPLE_BYTES) == 512
    assert longest_step(SPEC, linear, 3.0 * SPEC.layers, AMPLE_BYTES) == 2048


def test_no_step_is_so_long_that_decode_would_wait_for_ages() -> None:
    slow = tuple(replace(one, layer_ms=one.layer_ms * MOST_STEP_MS / SPEC.layers) for one in SUBLINEAR)
    assert longest_step(SPEC, slow, 0.0, AMPLE_BYTES) == 1024


def test_work_space_of_a_longer_step_takes_a_small_part_of_the_memory() -> None:
    enough = int(workspace_bytes(SPEC, 1024) / WORKSPACE_SHARE) + 1
    assert longest_step(SPEC, SUBLINEAR, 0.0, enough) == 1024
    assert longest_step(SPEC, SUBLINEAR, 0.0, enough - 100) == 512


def test_layers_with_a_window_keep_room_for_no_longer_step() -> None:
    windows: tuple[int | None, ...] = (None,) * (SPEC.layers - 1) + (128,)
    assert longest_step(replace(SPEC, kv_windows=windows), SUBLINEAR, 0.0, AMPLE_BYTES) == MAX_STEP_TOKENS


def test_rows_of_a_step_fit_what_a_hop_may_have_waiting() -> None:
    fitting = WINDOW_BYTES // 1024 // 4
    assert longest_step(replace(SPEC, hidden_size=fitting), SUBLINEAR, 0.0, AMPLE_BYTES) == 1024
    assert longest_step(replace(SPEC, hidden_size=fitting + 1), SUBLINEAR, 0.0, AMPLE_BYTES) == 512
