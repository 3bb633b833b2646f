"""A peer that computes each prompt whole, in one step before decode goes on: what pieces and roles are beside."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from molink.peer.commands import cli
from molink.peer.daemon import compute_setup
from molink.peer.hop.layered_prefill import LayeredPrefill
from molink.peer.scheduling.microbatch import BatchLimits
from molink.shards.spec import ModelSpec

LONGEST_TOKENS = 4096


def take_whole(_: object, steps: Sequence[Any], __: Callable[[], int]) -> Sequence[Any]:
    return steps


def limits_of_whole_prompts(_: object, spec: ModelSpec, *__: object) -> BatchLimits:
    return compute_setup.batch_limits(spec, BatchLimits(max_tokens=LONGEST_TOKENS))


REPLACED = LayeredPrefill.take_prompts, compute_setup.limits_on
"""Has to be there: a name that is only assigned to would be made."""

if __name__ == "__main__":
    LayeredPrefill.take_prompts = take_whole  # type: ignore[method-assign]
    compute_setup.limits_on = limits_of_whole_prompts  # type: ignore[assignment]
    cli.main(sys.argv[1:])
