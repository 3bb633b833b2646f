"""A hub that misbehaves costs patience, or ends in one clear sentence; nothing half-fetched is taken for whole."""

import errno
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import DEADLINE_S
from support.models.fake_hub import Answer, Asked, Fault
from support.models.hub_models import HubSide

from molink.shards.backoff import Backoff
from molink.shards.checkpoint.safetensors_header import StoreError
from molink.shards.errors import WeightsError
from molink.shards.hub import fetching, partial_download
from molink.shards.hub.hub import HubClient, HubError, HubFile, NotGiven, RetryPolicy, parse_listing
from molink.shards.spec import Span

SPAN = Span(1, 3)


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some kilobytes in several pieces and requests, as those of some gigabytes are."""
    monkeypatch.setattr(partial_download, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(fetching, "REQUEST_BYTES", 30_000)


def times(count: int, fault: Fault) -> Fault:
    """The fault for the first `count` answers, then none."""
    left = [count]

    def apply(asked: Asked, answer: Answer) -> Answer:
        if left[0] <= 0:
            return answer
        left[0] -= 1
        return fault(asked, answer)

    return apply


def status(code: int, **headers: str) -> Fault:
    return lambda *_: Answer(code, b"busy", headers)


def break_off(_: Asked, answer: Answer) -> Answer:
    return replace(answer, breaks_off_after=len(answer.body) // 2)


def flip(_: Asked, answer: Answer) -> Answer:
    return replace(answer, body=bytes(byte ^ 1 for byte in answer.body))


def ignore_ranges(side: HubSide) -> Fault:
    return lambda asked, _: Answer(200, side.hub.files[asked.name], {})


def wrong_range(_: Asked, answer: Answer) -> Answer:
    return replace(answer, headers={"Content-Range": f"bytes 0-{len(answer.body) - 1}/{len(answer.body)}"})


def compress(_: Asked, answer: Answer) -> Answer:
    return replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"})


@pytest.mark.parametrize(
    "fault",
    [
        times(2, break_off),
        times(2, status(503)),
        times(1, status(429, **{"Retry-After": "7"})),
        times(2, status(500)),
        times(2, status(403)),
        times(2, wrong_range),
        times(2, compress),
    ],
    ids=["break-off", "503", "429", "500", "expired address", "wrong range", "compressed"],
)
def test_passing_trouble_is_waited_out_and_nothing_is_fetched_twice(side: HubSide, fault: Fault) -> None:
    with side.store(name="untroubled") as store:
        expected = side.fetch(store, SPAN)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = fault
        assert side.fetch(store, SPAN) == expected
    assert side.pauses


def test_a_server_may_say_how_long_to_wait_within_reason(side: HubSide) -> None:
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = times(1, status(429, **{"Retry-After": "7"}))
        side.fetch(store, SPAN)
    assert side.pauses == [7.0]
    assert RetryPolicy().pause_s(1, 10_000.0, 0.5) == RetryPolicy().backoff.longest_s


def test_pauses_grow_and_differ_between_peers() -> None:
    patience = RetryPolicy()
    pauses = [patience.pause_s(failures, 0.0, 0.5) for failures in range(1, 12)]
    assert pauses == sorted(pauses)
    assert pauses[1] == 2 * pauses[0]
    assert pauses[-1] == patience.backoff.longest_s
    assert patience.pause_s(1, 0.0, 0.0) < patience.pause_s(1, 0.0, 0.9)


def test_a_server_that_ignores_ranges_is_read_past_what_is_not_wanted(side: HubSide) -> None:
    with side.store(name="untroubled") as store:
        expected = side.fetch(store, SPAN)
    side.hub.fault = ignore_ranges(side)
    with side.store() as store:
        assert side.fetch(store, SPAN) == expected


def test_a_server_that_ignores_ranges_of_a_huge_file_is_given_up(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.shards.hub.hub.MOST_SKIPPED_BYTES", 1000)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = ignore_ranges(side)
        with pytest.raises(WeightsError, match="ignores range requests"):
            side.fetch(store, SPAN)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (status(503), "cannot be fetched from the hub: the server answered 503"),
        (status(416), "shorter than the hub says"),
        (lambda _, answer: replace(answer, breaks_off_after=0), "cannot be fetched from the hub"),
    ],
    ids=["503", "416", "silence"],
)
def test_lasting_trouble_is_one_clear_error_and_another_try_goes_on_from_there(
    side: HubSide, fault: Fault, said: str
) -> None:
    with side.store(name="untroubled") as store:
        expected = side.fetch(store, SPAN)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = fault
        with pytest.raises(WeightsError, match=said):
            side.fetch(store, SPAN)
        side.hub.fault = None
        assert side.fetch(store, SPAN) == expected


def test_a_server_that_falls_silent_is_given_up(side: HubSide) -> None:
    never = threading.Event()

    def hold(_: Asked, answer: Answer) -> Answer:
        never.wait(DEADLINE_S)
        return answer

    with side.store() as store:
        side.checkpoint(store)
        side.patience = RetryPolicy(attempts=2, silence_s=0.2)
        side.hub.fault = hold
        try:
            with pytest.raises(WeightsError, match="cannot be fetched from the hub: timed out"):
                side.fetch(store, SPAN)
        finally:
            never.set()


@contextmanager
def dripping_server(head: bytes) -> Iterator[str]:
    """Answers with `head`, then a byte at a time for as long as anybody reads; its address."""
    done = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(2**16)
            connection.sendall(head)
            while not done.wait(0.01):
                connection.sendall(b"x")

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()


class OfSlowAnswers(RetryPolicy):
    """Gives an exchange half a second, however long silence may last."""

    def deadline_s(self, began_s: float, received_bytes: int) -> float:  # noqa: ARG002
        return began_s + 0.5


BODY_BEGINS = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-99999/100000\r\nContent-Length: 100000\r\n\r\n"
)


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\nX: ", BODY_BEGINS],
    ids=["headers", "body"],
)
def test_a_server_that_drips_is_given_up_though_it_is_never_silent(head: bytes) -> None:
    file = HubFile("model.safetensors", 100_000, "0" * 64)
    patience = OfSlowAnswers(attempts=1, connect_s=DEADLINE_S, silence_s=DEADLINE_S)
    with (
        dripping_server(head) as endpoint,
        HubClient("some/model", "0" * 40, endpoint=endpoint, patience=patience) as client,
        pytest.raises(HubError, match=r"timed out|too slowly"),
    ):
        b"".join(client.stream(file, 0, 100_000))


@pytest.mark.parametrize(
    ("wanted", "wait_s"),
    [
        ("7", 7.0),
        ("", 0.0),
        ("-1", 0.0),
        ("\xb2", 0.0),
        ("\u0663", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_only_a_plain_number_is_how_long_a_server_asks_to_wait(wanted: str, wait_s: float) -> None:
    answer = httpx.Response(
        503, headers=[(b"Retry-After", wanted.encode("utf-8" if wanted > "\xff" else "latin-1"))]
    )
    pauses: list[float] = []
    with (
        HubClient(
            "some/model",
            "0" * 40,
            endpoint="http://203.0.113.9",
            patience=RetryPolicy(attempts=2, backoff=Backoff(first_s=0.0, longest_s=9.0, jitter=0.0)),
            pause=pauses.append,
            transport=httpx.MockTransport(lambda _: answer),
        ) as client,
        pytest.raises(HubError, match="the server answered 503"),
    ):
        client.listing()
    assert pauses == [wait_s]


def test_after_a_crash_only_what_is_missing_is_fetched(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One after the other: what fails must not end what has not arrived yet.
    monkeypatch.setattr("molink.shards.hub.fetching.CONNECTIONS", 1)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.weight_ranges()
        asks = itertools.count()
        side.hub.fault = lambda asked, answer: status(503)(asked, answer) if next(asks) else answer
        with pytest.raises(WeightsError):
            side.fetch(store, SPAN)
    side.hub.weight_ranges()
    side.hub.fault = None
    with side.store() as store:  # what another process finds
        fetched = side.fetch(store, SPAN)
    after = side.hub.weight_ranges()
    size = sum(map(len, fetched.values()))
    refetched = sum(stop - start for own in after.values() for start, stop in own)
    assert 0 < refetched < size


def test_wrong_bytes_are_fetched_again_once(side: HubSide) -> None:
    with side.store(name="untroubled") as store:
        expected = side.fetch(store, SPAN)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = times(1, flip)
        assert side.fetch(store, SPAN) == expected


def test_wrong_bytes_that_come_again_are_one_clear_error_and_nothing_is_held(side: HubSide) -> None:
    with side.store() as store:
        side.checkpoint(store)
        side.hub.fault = flip
        with pytest.raises(WeightsError, match="not those of the model that is served") as raised:
            side.fetch(store, SPAN)
        assert all("layers.1." in name for name in raised.value.tensors)
        side.hub.fault = None
        assert side.fetch(store, SPAN)


def test_a_disk_that_fills_is_one_clear_error_and_another_try_goes_on(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side.store(name="untroubled") as store:
        expected = side.fetch(store, SPAN)
    write, left = partial_download.PartialDownload.write, [5]

    def fill_up(self: partial_download.PartialDownload, at: int, data: bytes) -> None:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        write(self, at, data)

    with side.store() as store:
        side.checkpoint(store)
        monkeypatch.setattr(partial_download.PartialDownload, "write", fill_up)
        with pytest.raises(WeightsError, match="is full: make room, then try again"):
            side.fetch(store, SPAN)
        monkeypatch.undo()
        assert side.fetch(store, SPAN) == expected


def test_gated_and_missing_models_are_told_apart_from_trouble(side: HubSide) -> None:
    with side.store() as store:
        side.hub.gated = True
        with pytest.raises(NotGiven, match="accepted its terms"):
            side.checkpoint(store)
        side.hub.gated, side.hub.token = False, "somebody else's"
        with side.store(name="fresh") as fresh, pytest.raises(NotGiven, match="does not have"):
            side.checkpoint(fresh)


def spoil_header(data: bytes) -> bytes:
    return (2**40).to_bytes(8, "little") + data[8:]


def cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "spoil", [spoil_header, cut_short, lambda _: b"", lambda _: b"\2" + bytes(7) + b"[]"]
)
def test_a_damaged_weight_file_is_one_clear_error(side: HubSide, spoil: Callable[[bytes], bytes]) -> None:
    name = "model-00002-of-00004.safetensors"
    side.hub.files[name] = spoil(side.hub.files[name])
    with side.store() as store, pytest.raises(StoreError, match=name):
        side.checkpoint(store)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"model.norm.weight": "model-00009-of-00004.safetensors"}, "lacks 1 of"),
        ({"no.such.tensor": "model-00001-of-00004.safetensors"}, "lacks 1 tensors"),
        ({"model.norm.weight": "../other.safetensors"}, "no file beside it"),
    ],
)
def test_a_wrong_index_is_one_clear_error(side: HubSide, weight_map: dict[str, str], said: str) -> None:
    name = "model.safetensors.index.json"
    index = json.loads(side.hub.files[name])
    index["weight_map"] |= weight_map
    side.hub.files[name] = json.dumps(index).encode()
    with side.store() as store, pytest.raises(StoreError, match=said):
        side.checkpoint(store)


def test_without_an_index_there_is_one_file_or_no_model(side: HubSide) -> None:
    del side.hub.files["model.safetensors.index.json"]
    with side.store() as store, pytest.raises(StoreError, match=r"lacks 1 of 1 weight files"):
        side.checkpoint(store)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"siblings": 3}', b'{"siblings": [{}]}', b"[" * 100_000]
    + [
        json.dumps({"siblings": [{"rfilename": "a.safetensors", **entry}]}).encode()
        for entry in (
            {},
            {"size": -1, "blobId": "0" * 40},
            {"size": 1, "blobId": "../x"},
            {"size": 1, "blobId": 7},
        )
    ],
)
def test_an_answer_that_describes_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(HubError, match="not the description of a model"):
        parse_listing(data)


SOME_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rfilename", "size", "blobId", "lfs", "sha256", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["model.safetensors", "../a.safetensors", "a.bin"]) | SOME_JSON


@given(
    st.lists(st.fixed_dictionaries({"rfilename": NAMES}, optional={"size": SOME_JSON, "blobId": SOME_JSON}))
)
def test_no_answer_of_a_hub_is_more_than_an_error(siblings: list[dict[str, object]]) -> None:
    try:
        files = parse_listing(json.dumps({"siblings": siblings}).encode())
    except HubError:
        return
    assert all(file.name == name == "model.safetensors" for name, file in files.items())


def test_files_elsewhere_in_the_repository_are_not_the_models() -> None:
    entry = {"size": 1, "blobId": "0" * 40}
    names = ["a.safetensors", "onnx/b.safetensors", "c.bin", "..\\d.safetensors"]
    assert list(
        parse_listing(json.dumps({"siblings": [{"rfilename": n, **entry} for n in names]}).encode())
    ) == ["a.safetensors"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "[::1]", "10.0.0.7", "169.254.169.254", "localhost", "[::ffff:10.0.0.7]"]
)
def test_a_public_hub_sends_nobody_into_a_private_network(host: str) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(302, headers={"Location": f"http://{host}/latest/meta-data"})

    transport = httpx.MockTransport(answer)
    with (
        HubClient("evil/model", "0" * 40, endpoint="http://203.0.113.9", transport=transport) as client,
        pytest.raises(HubError, match="nothing is fetched from there"),
    ):
        client.listing()
    assert asked == ["203.0.113.9"]


def test_a_hub_in_a_private_network_may_send_on_within_it() -> None:
    asked: list[str] = []
    ways = {"127.0.0.1:9": "127.0.0.1:10", "127.0.0.1:10": "8.8.8.8", "8.8.8.8": "10.0.0.7"}

    def answer(request: httpx.Request) -> httpx.Response:
        host = request.url.netloc.decode()
        asked.append(host)
        return httpx.Response(302, headers={"Location": f"http://{ways[host]}/file"})

    transport = httpx.MockTransport(answer)
    with (
        HubClient("own/model", "0" * 40, endpoint="http://127.0.0.1:9", transport=transport) as client,
        pytest.raises(HubError, match=r"10\.0\.0\.7"),
    ):
        client.listing()
    assert asked == list(ways)
