"""Several downloads at once: ranges into unfinished tensors, or whatever else reads from a hub."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Final

from molink.shards.hub.hub import HubClient, HubFile
from molink.shards.hub.partial_download import PartialDownload
from molink.shards.hub.ranges import ByteRange, RangeRequest, plan_requests

CONNECTIONS: Final = 8
"""To the hub at once."""
GAP_BYTES: Final = 2**16
"""Bytes that nobody wants are read when there are so few of them between two that are wanted."""
REQUEST_BYTES: Final = 2**25
"""A larger one would gain little, and hold up the end of the whole."""

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all. From any thread, one call at a time."""
Job = Callable[[threading.Event], None]
"""Ends soon after the event is set."""


class ByteCounter:
    """How much of something has arrived. Threads may add at once."""

    def __init__(self, progress: Progress, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """So many bytes more. What had to be fetched again does not count beyond the whole."""
        with self._lock:
            self._done_bytes = min(self._done_bytes + count, self._total_bytes)
            if self._total_bytes:
                self._progress(self._done_bytes, self._total_bytes)


def run_all(jobs: Sequence[Job]) -> None:
    """Runs the jobs, CONNECTIONS at a time. After the first that fails the others are ended, and its error raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
        running = [pool.submit(job, stop) for job in jobs]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    for future in done:
        future.result()


def fetch_missing(
    client: HubClient, arriving: Iterable[tuple[HubFile, PartialDownload]], counter: ByteCounter
) -> None:
    """Fetches what is missing of the tensors, in parallel range requests.

    Raises:
        HubError, OSError: it cannot be had or written. What has arrived is marked as there.
    """
    homes: dict[HubFile, dict[ByteRange, PartialDownload]] = {}
    for file, tensor in arriving:
        missing = tensor.missing()
        homes.setdefault(file, {}).update(dict.fromkeys(missing, tensor))
        counter.add(tensor.stop - tensor.start - sum(piece.stop - piece.start for piece in missing))

    def job(file: HubFile, request: RangeRequest) -> Job:
        return lambda stop: _fetch(client, file, request, homes[file], counter, stop)

    run_all(
        [
            job(file, request)
            for file, pieces in homes.items()
            for request in plan_requests(pieces, gap_bytes=GAP_BYTES, request_bytes=REQUEST_BYTES)
        ]
    )


def _fetch(
    client: HubClient,
    file: HubFile,
    request: RangeRequest,
    homes: dict[ByteRange, PartialDownload],
    counter: ByteCounter,
    stop: threading.Event,
) -> None:
    pieces = iter(request.pieces)
    piece = next(pieces)
    at = request.start
    for data in client.stream(file, request.start, request.stop):
        begin, end = at, at + len(data)
        while at < end:
            if stop.is_set():
                return
            if at < piece.start:
                at = min(piece.start, end)
                continue
            until = min(piece.stop, end)
            homes[piece].write(at, data[at - begin : until - begin])
            counter.add(until - at)
            at = until
            if at == piece.stop:
                homes[piece].mark(piece)
                piece = next(pieces, piece)
