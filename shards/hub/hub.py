"""A model's files on a Hugging Face hub: what there is at one commit, and ranges of their bytes."""

import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

from molink.shards.address_ranges import AddressRange, range_of
from molink.shards.backoff import Backoff
from molink.shards.checkpoint.safetensors_header import StoredTensor, is_unsafe_name

if TYPE_CHECKING:  # peers whose models are here do not wait for it
    import httpx

    from molink.shards.hub.read_deadline import ReadDeadline

SLOWEST_BYTES_PER_S: Final = 16 * 1024
"""An answer that comes more slowly is given up and asked for again."""
MOST_SKIPPED_BYTES: Final = 2**28
"""A server that ignores ranges sends a file from its beginning; so much of it is read and thrown away, not more."""
PROGRESS_BYTES: Final = 2**16
"""An attempt that brought so much was no failure, even if it broke off."""
MAX_LISTING_BYTES: Final = 2**25
BACKOFF: Final = Backoff(first_s=0.5, longest_s=30.0, jitter=0.5)
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_CONTENT_ID: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class HubError(Exception):
    """The hub cannot be reached, or does not give what was asked for. The sentence says what and why."""


class NotGiven(HubError):
    """The hub has no such model or file, or does not give it to this user."""


class _Broken(Exception):
    """One attempt failed, and another may succeed."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file at one commit."""

    name: str
    size_bytes: int
    content_id: str
    """Equal for equal contents: the SHA-256 of a large file, git's hash of a small one."""

    def new_hash(self) -> "hashlib._Hash":
        """Fed with the contents, its hexadecimal digest is `content_id`."""
        if len(self.content_id) == 64:
            return hashlib.sha256()
        git = hashlib.sha1(usedforsecurity=False)
        git.update(f"blob {self.size_bytes}\0".encode())
        return git


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A tensor, and the hub's file that holds it."""

    file: HubFile
    tensor: StoredTensor

    @property
    def size_bytes(self) -> int:
        return self.tensor.stop - self.tensor.start


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry policy: how often and how long a hub is waited for."""

    attempts: int = 6
    """In a row that bring next to nothing; then it is given up."""
    backoff: Backoff = BACKOFF
    """Its longest wait is the longest for what a server asks as well."""
    connect_s: float = 10.0
    silence_s: float = 30.0
    """Without a byte."""

    def deadline_s(self, began_s: float, received_bytes: int) -> float:
        """The moment at which an exchange that began at `began_s` is too slow, unless more than this has come of the
        answer's body by then."""
        return began_s + self.connect_s + self.silence_s + received_bytes / SLOWEST_BYTES_PER_S

    def pause_s(self, failures: int, wanted_s: float, chance: float) -> float:
        """After so many failures in a row, if the server asks for `wanted_s`; `chance` in [0, 1) spreads peers."""
        return min(max(self.backoff.after(failures, chance), wanted_s), self.backoff.longest_s)


class HubClient:
    """Requests about one model at one commit, between `__enter__` and `__exit__`. Any threads may use it at once.

    The user's token goes to the hub alone: where the hub redirects to another host, it stays behind.
    """

    def __init__(
        self,
        model: str,
        commit: str,
        *,
        endpoint: str | None = None,
        patience: RetryPolicy = RetryPolicy(),
        pause: Callable[[float], None] = time.sleep,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        """`endpoint` is the hub's address, by default that of `HF_ENDPOINT`; `transport` what carries requests, by
        default the network."""
        self.model = model
        self.commit = commit
        self._endpoint = endpoint
        self._patience = patience
        self._pause = pause
        self._transport = transport
        self._client: httpx.Client | None = None
        self._deadline: ReadDeadline | None = None
        self._opening = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def listing(self) -> dict[str, HubFile]:
        """The safetensors files beside config.json, by name.

        Raises:
            HubError: they cannot be had.
        """
        path = f"/api/models/{quote(self.model)}/revision/{quote(self.commit, safe='')}?blobs=true"
        data = b"".join(self._persistent(lambda _: self._whole(self._base() + path), "the list of files"))
        return parse_listing(data)

    def stream(self, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of the file, as they come. Goes on where a connection broke off.

        Raises:
            HubError: they cannot be had.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.model, file.name, revision=self.commit, endpoint=self._base())
        yield from self._persistent(
            lambda at: self._range(url, file, start + at, stop), file.name, stop - start
        )

    def _base(self) -> str:
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            raise HubError("HF_HUB_OFFLINE forbids it")
        return (self._endpoint or constants.ENDPOINT).rstrip("/")

    def _persistent(
        self, attempt: Callable[[int], Iterator[bytes]], what: str, size_bytes: int | None = None
    ) -> Iterator[bytes]:
        """What attempts bring, each from where the one before it ended; to `size_bytes`, or to the first good end."""
        import httpx

        at = failures = 0
        while size_bytes is None or at < size_bytes:
            before = at
            try:
                for data in attempt(at):
                    at += len(data)
                    yield data
                if size_bytes is None or at >= size_bytes:
                    return
                raise _Broken("the connection ended too early")
            except (httpx.HTTPError, _Broken) as error:
                failures = 1 if at - before >= PROGRESS_BYTES else failures + 1
                if failures >= self._patience.attempts:
                    reason = str(error) or type(error).__name__
                    raise HubError(
                        f"{what} of {self.model} cannot be fetched from the hub: {reason}"
                    ) from error
                wanted_s = error.wait_s if isinstance(error, _Broken) else 0.0
                self._pause(self._patience.pause_s(failures, wanted_s, random.random()))

    def _whole(self, url: str) -> Iterator[bytes]:
        """A small answer, all of it at once: it is asked for anew if it breaks off."""
        with self._exchange(url) as (response, body):
            self._refuse(response, "it")
            content = bytearray()
            for data in body:
                content += data
                if len(content) > MAX_LISTING_BYTES:
                    raise HubError(f"the hub's description of {self.model} has no end")
        yield bytes(content)

    def _range(self, url: str, file: HubFile, start: int, stop: int) -> Iterator[bytes]:
        with self._exchange(url, {"Range": f"bytes={start}-{stop - 1}"}) as (response, body):
            self._refuse(response, file.name)
            skip = self._skipped(response, file, start)
            left = stop - start
            for data in body:
                useful = data[skip : skip + left]
                skip = max(0, skip - len(data))
                left -= len(useful)
                if useful:
                    yield useful
                if not left:
                    return

    @contextmanager
    def _exchange(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> Iterator[tuple["httpx.Response", Iterator[bytes]]]:
        """An answer, redirects followed, and its body as the network brings it: what drips is given up."""
        client, deadline = self._open()
        began_s = time.monotonic()
        with deadline.until(self._patience.deadline_s(began_s, 0)):
            response = client.send(client.build_request("GET", url, headers=headers), stream=True)
        try:
            yield response, self._in_time(response, began_s)
        finally:
            response.close()

    def _in_time(self, response: "httpx.Response", began_s: float) -> Iterator[bytes]:
        received_bytes = 0
        for data in response.iter_raw():  # in chunks of a size it would wait until one is full, however long
            if time.monotonic() > self._patience.deadline_s(began_s, received_bytes):
                raise _Broken("it comes too slowly")
            received_bytes += len(data)
            yield data

    def _skipped(self, response: "httpx.Response", file: HubFile, start: int) -> int:
        """How many bytes come before the first one that was asked for."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _Broken("it came compressed")
        if response.status_code == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            if found is None or int(found[1]) != start:
                raise _Broken("the server sent another range than was asked for")
            if found[3] not in ("*", str(file.size_bytes)):
                raise _Broken(f"the server's copy has {found[3]} bytes, not {file.size_bytes}")
            return 0
        if start > MOST_SKIPPED_BYTES:
            raise HubError(
                f"the server of {self.model} ignores range requests, so that a part of {file.name} cannot be fetched: "
                "download the model and give its directory"
            )
        return start

    def _refuse(self, response: "httpx.Response", what: str) -> None:
        """Raises unless the answer is the content that was asked for."""
        status = response.status_code
        if status in (200, 206):
            return
        if status in _PASSING:
            wanted = response.headers.get("retry-after", "")
            raise _Broken(f"the server answered {status}", retry_after_s(wanted))
        if response.history and status in (401, 403, 404, 410):
            raise _Broken(f"the address that the hub gave answered {status}")  # such addresses expire
        if response.headers.get("x-error-code") == "GatedRepo" or status == 403:
            raise NotGiven(
                f"the hub gives {what} of {self.model} only to those who accepted its terms: accept them on the "
                "model's page, then run `hf auth login`"
            )
        if status == 416:
            raise HubError(f"the hub's {what} of {self.model} is shorter than the hub says")
        raise NotGiven(
            f"the hub does not have {what} of {self.model} at commit {self.commit[:12]} ({status})"
        )

    def _open(self) -> tuple["httpx.Client", "ReadDeadline"]:
        """Connections, made when they are first needed: often everything is there already."""
        import httpx
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        from molink.shards.hub.read_deadline import ReadDeadline

        with self._opening:
            if self._client is None or self._deadline is None:
                self._client = httpx.Client(
                    headers={**build_hf_headers(library_name="molink"), "Accept-Encoding": "identity"},
                    timeout=httpx.Timeout(self._patience.silence_s, connect=self._patience.connect_s),
                    follow_redirects=True,
                    transport=self._transport,
                    event_hooks={"request": [self._refuse_own_network]},
                )
                self._deadline = ReadDeadline()
                self._deadline.guard(self._client)
            return self._client, self._deadline

    def _refuse_own_network(self, request: "httpx.Request") -> None:
        """Before each request, redirected ones too: nobody but the owner sends this machine to its own network."""
        import httpx
        from huggingface_hub import constants

        hub = httpx.URL(self._endpoint or constants.ENDPOINT).host
        host = request.url.host
        if host == hub:
            return
        allowed = {AddressRange.PUBLIC, *_ranges_of(hub)}
        if not _ranges_of(host) <= allowed:
            raise HubError(
                f"the hub sent this machine on to {host[:100]!r}, which is in a private network: nothing is fetched "
                "from there. If that is meant, set HF_ENDPOINT to a hub in that network"
            )


def retry_after_s(wanted: str) -> float:
    """Seconds that a Retry-After header asks for; 0.0 where it gives a date, or is not what RFC 9110 allows."""
    return float(wanted) if wanted.isascii() and wanted.isdecimal() else 0.0


def _ranges_of(host: str) -> set[AddressRange]:
    """Where a host is; empty if it is a name that this machine cannot look up, as behind a proxy."""
    known = range_of(host)
    if known is not None:
        return {known}
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {kind for one in found if (kind := range_of(str(one[4][0]))) is not None}


def parse_listing(data: bytes) -> dict[str, HubFile]:
    """The safetensors files of a hub's answer about a model, by name; those in subfolders are not the model's.

    Raises:
        HubError: it is not such an answer.
    """
    try:
        siblings = json.loads(data)["siblings"]
        files = [_file(entry) for entry in siblings]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"the hub's answer is not the description of a model: {error!r:.200}") from error
    return {file.name: file for file in files if file is not None}


def _file(entry: Mapping[str, Any]) -> HubFile | None:
    name = entry["rfilename"]
    if not isinstance(name, str) or is_unsafe_name(name) or not name.endswith(".safetensors"):
        return None
    large = entry.get("lfs")
    size, content_id = (large["size"], large["sha256"]) if large else (entry["size"], entry["blobId"])
    if type(size) is not int or not 0 <= size < 2**48 or not _CONTENT_ID.fullmatch(content_id):
        raise ValueError(f"{name[:200]!r} has no size or hash")
    return HubFile(name, size, content_id)
