"""Full garbage collection frees what was frozen, and freezes nothing where nothing was frozen."""

import gc
import weakref

import pytest

from molink.peer.device.device import give_back_memory
from molink.shards.device.garbage import collect_garbage


class Cycle:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def dropped(*, frozen: bool) -> weakref.ref[Cycle]:
    """A cycle that nothing refers to any more."""
    cycle = Cycle()
    gc.unfreeze()
    if frozen:
        gc.freeze()
    return weakref.ref(cycle)


@pytest.mark.usefixtures("freezing")
@pytest.mark.parametrize("frozen", [False, True], ids=["nothing was frozen", "frozen"])
def test_what_is_dropped_is_freed_and_only_what_was_frozen_is_frozen_afterwards(frozen: bool) -> None:
    cycle = dropped(frozen=frozen)
    collect_garbage()
    assert cycle() is None
    assert (gc.get_freeze_count() > 0) == frozen


@pytest.mark.full
@pytest.mark.usefixtures("freezing")
def test_a_process_that_freezes_nothing_finds_its_collector_as_it_was_after_memory_is_given_back() -> None:
    cycle = dropped(frozen=False)
    give_back_memory("cpu")
    assert cycle() is None
    assert gc.get_freeze_count() == 0
