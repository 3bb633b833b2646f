"""Full garbage collection in a process that has frozen what it loaded at its start, and in one that has not."""

import gc


def collect_garbage() -> None:
    """Frees what only refers to itself, such as the modules of dropped layers, though it was frozen: a collection that
    takes a tenth of a second. Only where something was frozen it is thawed, and what is left is frozen again: elsewhere
    the collector belongs to whoever runs the process."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
