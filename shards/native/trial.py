"""The process that tries native ways: `python -m molink.shards.native.trial TABLE`, started by
`molink.peer.compute.native_ways`.

It reads jobs from stdin, a JSON object a line, and writes on stdout what it begins before it begins it, and what came
of it behind: if it dies, its last line says of what. TABLE names a module with `WAYS`, which makes of a way's name and
a job what multiplies so many rows. Of packages only those of that module are loaded, with torch.
"""

import faulthandler
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from molink.safe_import import forbid_core_dumps
from molink.shards.native.native_way import TrialJob

ROUNDING: Final = 2.0
"""A result is wrong if it is so many times as far from float64 as the plain product."""
SAID_MOST: Final = 160
WITHIN_S: Final = 5.0
"""A product takes no longer, or is taken for an endless loop."""
PREPARED_WITHIN_S: Final = 30.0
"""So long a matrix may be laid out and packed, and a library that does it be imported."""
STARVED_S: Final = 30.0
"""So much longer on a machine whose other programs keep it from computing. Then the process ends itself, whether its
peer still lives or not."""


class Products(NamedTuple):
    """Results of a way, of the plain product in the same dtype, and of float64: [rows, outputs]."""

    found: Tensor
    plain: Tensor
    exact: Tensor
    terms: int
    """Numbers in each sum."""
    taken_s: float
    """By the way alone."""


Attempt: TypeAlias = Callable[[int], Products | None]
"""Multiplies so many rows; None: the way does not take so many."""
Table: TypeAlias = Mapping[str, Callable[[TrialJob], tuple[Attempt, int]]]
"""By the names of ways: of a job its attempt, and the bytes of weights that one row reads."""


def main(table: str) -> None:
    """Tries all jobs of stdin, in their order. What takes longer than is allowed ends the process, and so does the end
    of the peer."""
    forbid_core_dumps()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    ways: Table = importlib.import_module(table).WAYS

    def say(**line: object) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    jobs = [TrialJob.of(json.loads(line)) for line in sys.stdin]
    say(ready=True)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for number, job in enumerate(jobs):

            def begin(rows: int, number: int = number) -> None:
                within_s = WITHIN_S if rows else PREPARED_WITHIN_S
                faulthandler.dump_traceback_later(within_s + STARVED_S + 1, exit=True, file=nowhere)
                say(begins=number, rows=rows)

            say(ended=number, **_tried(job, ways, begin))
        faulthandler.cancel_dump_traceback_later()


def _tried(job: TrialJob, ways: Table, begin: Callable[[int], None]) -> dict[str, object]:
    """Returns what came of a job: an error, or the speed with one row."""
    torch.set_num_threads(job.threads)
    read_s, nbytes = 0.0, 0
    try:
        with torch.inference_mode():
            begin(0)
            attempt, nbytes = ways[job.way](job)
            for count in job.counts:
                begin(count)
                products = attempt(count)
                if products is None:
                    continue
                reason = wrong(products)
                if reason is not None:
                    return {"error": f"{reason} with {rows_of(count)}"}
                read_s = read_s or products.taken_s
    except Exception as error:  # noqa: BLE001 - the boundary of this process: of native code there is no list of errors
        said = " ".join(str(error).split())[:SAID_MOST] or type(error).__name__
        return {"error": f"failed ({said})"}
    return {"bytes_per_s": nbytes / read_s if read_s else 0.0}


def rows_of(count: int) -> str:
    """So many rows, for people."""
    return "one row" if count == 1 else f"{count} rows"


def wrong(products: Products) -> str | None:
    """Says what is wrong with the way's numbers, or None: they may be ROUNDING times as far from float64 as the plain
    product's, or as far as float32 is when it sums one number after the other."""
    exact, found = products.exact, products.found.double()
    if found.shape != exact.shape or not bool(torch.isfinite(found).all()):
        return "gave what are no numbers"
    plain = float((products.plain.double() - exact).norm())
    summed = torch.finfo(torch.float32).eps / 2 * math.sqrt(products.terms) * float(exact.norm())
    if float((found - exact).norm()) > max(ROUNDING * plain, summed):
        return "gave wrong numbers"
    return None


if __name__ == "__main__":
    main(sys.argv[1])
