"""The store on disk: within its size, the least recently used first out, never what somebody uses."""

import errno
import hashlib
import multiprocessing
import os
import subprocess
import sys
from contextlib import nullcontext
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from filelock import AcquireReturnProxy, Timeout
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deadline import DEADLINE_S
from support.properties import examples

from molink.shards.hub import partial_download
from molink.shards.hub.partial_download import PartialDownload
from molink.shards.hub.ranges import ByteRange
from molink.shards.store import blobs
from molink.shards.store.blobs import BlobStore, InUse, StoreFull

HELD_BY_ANOTHER = """
import sys
from pathlib import Path
from molink.shards.store.blobs import BlobStore
with BlobStore(Path(sys.argv[1]), 1000) as store, store.using() as in_use:
    print(len(store.take({sys.argv[2]: 400}, in_use)), flush=True)
    sys.stdin.read()
"""


def put(store: BlobStore, content: bytes, in_use: InUse, *, used_s: int | None = None) -> str:
    """A tensor that has arrived; as if it had been used so many seconds after the epoch."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = store.unfinished(f"f-{sha256[:8]}")
    store.reserve({path: len(content)}, in_use)
    path.write_bytes(content)
    store.adopt({path: sha256}, in_use)
    if used_s is not None:
        os.utime(store.blob(sha256), (used_s, used_s))
    return sha256


def put_unused(store: BlobStore, content: bytes, used_s: int) -> str:
    with store.using() as in_use:
        return put(store, content, in_use, used_s=used_s)


def there(store: BlobStore, *sha256s: str) -> list[bool]:
    return [store.blob(sha256).is_file() for sha256 in sha256s]


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    with BlobStore(tmp_path, 1000) as store:
        first, second, third = (put_unused(store, bytes([n]) * 400, n) for n in (1, 2, 0))
        assert there(store, first, second, third) == [False, True, True]
        with store.using() as in_use:
            assert store.take({third: 400}, in_use) == {third}  # used now
        fourth = put_unused(store, b"4" * 400, 4)
        assert there(store, second, third, fourth) == [False, True, True]


def test_what_is_in_use_stays_even_if_that_means_an_error(tmp_path: Path) -> None:
    with BlobStore(tmp_path, 1000) as store, store.using() as in_use:
        first = put(store, b"1" * 400, in_use, used_s=1)
        second = put_unused(store, b"2" * 400, 2)
        put_unused(store, b"3" * 400, 3)
        assert there(store, first, second) == [True, False]
        with pytest.raises(StoreFull, match=r"100 bytes too many.*--store-size"):
            store.reserve({store.unfinished("big"): 700}, in_use)
        assert there(store, first) == [True]
        assert store.room_bytes() == 600


def test_what_another_process_uses_stays_until_that_process_is_gone(tmp_path: Path) -> None:
    with BlobStore(tmp_path, 1000) as store:
        sha256 = put_unused(store, b"1" * 400, 1)
        own = list((tmp_path / "users").glob("*.lock"))
        assert len(own) == 1
        other = subprocess.Popen(
            [sys.executable, "-c", HELD_BY_ANOTHER, str(tmp_path), sha256],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        with pytest.raises(StoreFull):
            put_unused(store, b"2" * 700, 2)
        other.kill()
        other.communicate()
        put_unused(store, b"2" * 700, 2)
        assert there(store, sha256) == [False]
        assert list((tmp_path / "users").glob("*.lock")) == own


def test_room_is_taken_as_soon_as_something_is_on_its_way(tmp_path: Path) -> None:
    with BlobStore(tmp_path, 1000) as store, store.using() as in_use:
        store.reserve({store.unfinished("a"): 600}, in_use)
        store.reserve({store.unfinished("a"): 600}, in_use)  # the same one: it is there already
        with pytest.raises(StoreFull):
            store.reserve({store.unfinished("b"): 600}, in_use)


def test_without_a_size_half_of_the_disk_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 2 * blobs.DISK_RESERVE_BYTES

    monkeypatch.setattr(blobs.shutil, "disk_usage", lambda _: Usage)
    with BlobStore(tmp_path) as store, store.using() as in_use:
        assert store.room_bytes() == blobs.DISK_RESERVE_BYTES
        with pytest.raises(StoreFull):
            store.reserve({store.unfinished("a"): blobs.DISK_RESERVE_BYTES + 1}, in_use)


def test_room_for_what_is_on_its_way_is_the_disks_and_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 4 * blobs.DISK_RESERVE_BYTES

    monkeypatch.setattr(blobs.shutil, "disk_usage", lambda _: Usage)
    part = blobs.DISK_RESERVE_BYTES // 2
    with BlobStore(tmp_path) as store, store.using() as in_use:
        room_bytes = store.room_bytes()
        for name in "abcd":  # files with holes: the disk has as much free as before
            store.reserve({store.unfinished(name): part}, in_use)
            room_bytes -= part
            assert store.room_bytes() == room_bytes
        with pytest.raises(StoreFull):
            store.reserve({store.unfinished("e"): part}, in_use)
    with BlobStore(tmp_path / "sized", 10**12) as store, store.using() as in_use:
        store.reserve({store.unfinished("a"): 3 * blobs.DISK_RESERVE_BYTES - 10}, in_use)
        store.reserve({store.unfinished("b"): 10}, in_use)
        with pytest.raises(StoreFull):
            store.reserve({store.unfinished("c"): 1}, in_use)


def test_where_a_system_says_nothing_of_blocks_a_file_takes_its_size() -> None:
    assert blobs._taken_bytes(cast("os.stat_result", SimpleNamespace(st_size=700))) == 700  # noqa: SLF001


@pytest.mark.parametrize("grows", [True, False])
def test_another_process_is_waited_for_while_what_it_fetches_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    waits: list[float] = []

    class HeldByAnother(blobs.FileLock):
        def acquire(self, timeout: float | None = None, **_: object) -> AcquireReturnProxy:  # type: ignore[override]
            waits.append(blobs.FETCH_TIMEOUT_S if timeout is None else timeout)
            if len(waits) < 4:
                if grows:
                    os.utime(path, ns=(0, len(waits)))
                raise Timeout(self.lock_file)
            return super().acquire(timeout=1)

    with BlobStore(tmp_path) as store, store.using() as in_use:
        path = store.unfinished("a")
        store.reserve({path: 100}, in_use)
        monkeypatch.setattr(blobs, "FileLock", HeldByAnother)
        entered = False
        with (
            nullcontext() if grows else pytest.raises(StoreFull, match="another process"),
            store.fetching("layer", [path]),
        ):
            entered = True
        monkeypatch.undo()
    assert entered is grows
    assert waits == [blobs.FETCH_TIMEOUT_S] * (4 if grows else 1)


def test_a_disk_that_others_fill_is_not_filled_to_the_brim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = blobs.DISK_RESERVE_BYTES + 100

    with BlobStore(tmp_path, 10**12) as store, store.using() as in_use:
        old = put_unused(store, b"1" * 400, 1)
        monkeypatch.setattr(blobs.shutil, "disk_usage", lambda _: Usage)
        store.reserve({store.unfinished("a"): 450}, in_use)
        assert there(store, old) == [False]


def test_digests_are_remembered_and_damaged_notes_forgotten(tmp_path: Path) -> None:
    with BlobStore(tmp_path) as store:
        store.notes.add_digests("file", {"a": "0" * 64})
        store.notes.add_digests("file", {"b": "1" * 64})
        store.notes.forget_digests("file", ["a", "never heard of"])
        assert store.notes.digests("file") == {"b": "1" * 64}
        for damage in (b"", b"[]", b'{"b": 3}', b'{"b": "../../x"}', b"[" * 100_000):
            store.notes.write("digests", "file", damage)
            assert store.notes.digests("file") == {}


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a\\b", "a:b", "..", "x" * 300])
def test_names_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    with BlobStore(tmp_path) as store:
        for use in (
            store.unfinished,
            lambda it: store.notes.read("kind", it),
            lambda it: store.notes.read(it, "key"),
        ):
            with pytest.raises(ValueError, match="no name"):
                use(name)


@settings(max_examples=examples(40))
@given(st.integers(0, 50), st.integers(1, 70), st.data())
def test_an_unfinished_tensor_knows_its_missing_pieces_after_any_interruption(
    tmp_path_factory: pytest.TempPathFactory, start: int, size: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_download, "PIECE_BYTES", 16)
        content = bytes(range(200))[start : start + size]
        with BlobStore(tmp_path_factory.mktemp("store"), 1000) as store, store.using() as in_use:
            tensor = PartialDownload(store.unfinished("f"), start, start + size)
            store.reserve({tensor.path: tensor.file_bytes}, in_use)
            every = tensor.missing()
            done = data.draw(st.sets(st.sampled_from(every)))
            for piece in done:
                tensor.write(piece.start, content[piece.start - start : piece.stop - start])
                tensor.mark(piece)
            again = PartialDownload(store.unfinished("f"), start, start + size)
            store.reserve({again.path: again.file_bytes}, in_use)
            assert set(again.missing()) == set(every) - done
            for piece in again.missing():
                again.write(piece.start, content[piece.start - start : piece.stop - start])
                again.mark(piece)
            assert again.missing() == ()
            assert again.finish().read_bytes() == content


@pytest.mark.parametrize(
    ("number", "gone"),
    [
        (errno.EIO, True),
        (errno.EACCES, True),
        (errno.EMFILE, False),
        (errno.ENFILE, False),
        (errno.ENOMEM, False),
    ],
    ids=["EIO", "EACCES", "EMFILE", "ENFILE", "ENOMEM"],
)
def test_what_the_disk_cannot_read_is_damaged_and_what_the_process_cannot_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, gone: bool
) -> None:
    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number), str(path))

    with BlobStore(tmp_path, 1000) as store:
        sha256 = put_unused(store, b"1" * 400, 1)
        monkeypatch.setattr(blobs, "hash_file", fail)
        with nullcontext() if gone else pytest.raises(OSError, match=os.strerror(number)):
            assert store.drop_damaged([sha256]) == 1
        assert there(store, sha256) == [not gone]


def test_an_empty_tensor_is_there_at_once(tmp_path: Path) -> None:
    with BlobStore(tmp_path) as store, store.using() as in_use:
        tensor = PartialDownload(store.unfinished("f"), 7, 7)
        store.reserve({tensor.path: tensor.file_bytes}, in_use)
        assert tensor.missing() == ()
        assert tensor.finish().read_bytes() == b""
        with pytest.raises(ValueError, match="no range"):
            ByteRange(7, 7)


def fetch_in_turn(folder: str, name: str, asking: Event, entered: Event) -> None:
    with BlobStore(Path(folder)) as store:
        asking.set()
        with store.fetching(name):
            entered.set()


def test_only_one_process_fetches_the_same_thing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    asking, entered = context.Event(), context.Event()
    with BlobStore(tmp_path) as store:
        with store.fetching("layer"):
            other = context.Process(target=fetch_in_turn, args=(str(tmp_path), "layer", asking, entered))
            other.start()
            assert asking.wait(DEADLINE_S)
            assert not entered.wait(0.5)
        assert entered.wait(DEADLINE_S)
        other.join(DEADLINE_S)
    assert other.exitcode == 0
