"""The local control endpoint obeys whoever shows the token, and nobody else."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.deadline import DEADLINE_S
from support.properties import examples

from molink.peer.daemon import local_listener
from molink.peer.daemon.control import ControlEndpoint, ControlError, NoPeerRunning, call_peer


class Peer:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.at_once = False
        self.answer: dict[str, object] = {"name": "Zoë", "spans": [[0, 4]]}

    def leave(self, at_once: bool) -> None:
        self.at_once = at_once
        self.left.set()

    def status(self) -> dict[str, object]:
        return self.answer


def endpoint(folder: Path, peer: Peer) -> ControlEndpoint:
    return ControlEndpoint(folder, peer.leave, peer.status)


async def exchange(port: int, line: bytes, *, end: bool = False) -> bytes:
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line)
        if end:
            writer.write_eof()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


def file_of(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "control.json").read_text())
    assert isinstance(content, dict)
    return content


def test_status_and_leave_reach_the_peer(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer()
        async with endpoint(tmp_path, peer):
            assert await call_peer(tmp_path, "status", DEADLINE_S) == {"name": "Zoë", "spans": [[0, 4]]}
            assert not peer.left.is_set()
            assert await call_peer(tmp_path, "leave", DEADLINE_S) == {}
            assert peer.left.is_set()
            assert not peer.at_once
            assert await call_peer(tmp_path, "leave-now", DEADLINE_S) == {}
            assert peer.at_once

    asyncio.run(scenario())


def test_the_control_file_is_private_and_goes_with_the_endpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            known = file_of(tmp_path)
            assert known["pid"] == os.getpid()
            assert len(str(known["token"])) == 64
            assert os.name == "nt" or (tmp_path / "control.json").stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / "control.json").exists()
        with pytest.raises(NoPeerRunning, match=r"no peer is running .*molink-peer join.*--state-dir"):
            await call_peer(tmp_path, "status", DEADLINE_S)

    asyncio.run(scenario())


def test_a_wrong_token_is_refused_and_nothing_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer = Peer()
        async with endpoint(tmp_path, peer):
            known = file_of(tmp_path)
            for token in ("", "0" * 64, str(known["token"])[:-1], None, 7, ["x"]):
                (tmp_path / "control.json").write_text(json.dumps({**known, "token": token}))
                with pytest.raises(ControlError):
                    await call_peer(tmp_path, "leave", DEADLINE_S)
                line = json.dumps({"token": token, "command": "leave"}).encode() + b"\n"
                assert json.loads(await exchange(int(str(known["port"])), line)) == {
                    "ok": False,
                    "error": "wrong token",
                }
            assert not peer.left.is_set()

    asyncio.run(scenario())


def test_an_unknown_command_is_refused_by_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            with pytest.raises(ControlError, match=r"refused dance: unknown command 'dance'"):
                await call_peer(tmp_path, "dance", DEADLINE_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [{"x": object()}, None])
def test_a_status_that_fails_is_told_and_does_not_end_the_endpoint(tmp_path: Path, answer: object) -> None:
    async def scenario() -> None:
        peer = Peer()
        async with endpoint(tmp_path, peer):
            good, peer.answer = peer.answer, answer  # type: ignore[assignment]
            with pytest.raises(ControlError, match="could not tell its status"):
                await call_peer(tmp_path, "status", DEADLINE_S)
            peer.answer = good
            assert await call_peer(tmp_path, "status", DEADLINE_S) == good

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"hello\n",
        b"[]\n",
        b"\xff\xfe\n",
        b"[" * 4000 + b"\n",
        b"x" * 100_000,
        b'{"token": "\\ud800"}\n',
    ],
)
def test_rubbish_is_refused_and_the_endpoint_goes_on(tmp_path: Path, line: bytes) -> None:
    async def scenario() -> None:
        peer = Peer()
        async with endpoint(tmp_path, peer):
            answer = await exchange(int(str(file_of(tmp_path)["port"])), line)
            assert answer == b"" or json.loads(answer)["ok"] is False
            assert await call_peer(tmp_path, "status", DEADLINE_S) == peer.answer
            assert not peer.left.is_set()

    asyncio.run(scenario())


@settings(max_examples=examples(50), deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_without_the_token_make_the_peer_leave(line: bytes) -> None:
    peer_left: list[bool] = []
    answer = ControlEndpoint(Path(), peer_left.append, dict).answer(line)
    assert json.loads(answer)["ok"] is False
    assert peer_left == []


def test_silent_connections_are_bounded_and_do_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            port = int(str(file_of(tmp_path)["port"]))
            with monkeypatch.context() as patched:
                patched.setattr(local_listener, "REQUEST_TIMEOUT_S", 0.2)
                answers = await asyncio.gather(
                    *(exchange(port, b"") for _ in range(3 * local_listener.CONNECTIONS))
                )
            assert set(answers) == {b""}
            assert "name" in await call_peer(tmp_path, "status", DEADLINE_S)

    asyncio.run(scenario())


def test_silent_connections_make_room_for_whoever_asks(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            port = int(str(file_of(tmp_path)["port"]))
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            assert "name" in await call_peer(tmp_path, "status", DEADLINE_S)
            async with asyncio.timeout(DEADLINE_S):  # the oldest has made room
                assert await silent[0][0].read() == b""
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for _, writer in silent), return_exceptions=True)

    asyncio.run(scenario())


def test_leaving_the_context_ends_connections_that_are_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(str(file_of(tmp_path)["port"])))
            assert "name" in await call_peer(tmp_path, "status", DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
        writer.close()

    asyncio.run(scenario())


def test_a_file_of_a_peer_that_was_killed_is_seen_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with endpoint(tmp_path, Peer()):
            left_behind = (tmp_path / "control.json").read_text()
        (tmp_path / "control.json").write_text(left_behind)
        with pytest.raises(NoPeerRunning, match="seems to have been killed"):
            await call_peer(tmp_path, "status", DEADLINE_S)

    asyncio.run(scenario())


def test_another_program_on_the_same_port_is_not_taken_for_the_peer(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 welcome\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        stranger = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with stranger:
            port = stranger.sockets[0].getsockname()[1]
            (tmp_path / "control.json").write_text(json.dumps({"port": port, "token": "t", "pid": 1}))
            with pytest.raises(NoPeerRunning):
                await call_peer(tmp_path, "status", DEADLINE_S)

    asyncio.run(scenario())


def test_a_peer_that_does_not_answer_is_given_up_after_the_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        silent = await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0)
        async with silent:
            port = silent.sockets[0].getsockname()[1]
            (tmp_path / "control.json").write_text(json.dumps({"port": port, "token": "t", "pid": 1}))
            with pytest.raises(ControlError, match=r"did not answer within 0\.1 s") as raised:
                await call_peer(tmp_path, "status", 0.1)
            assert not isinstance(raised.value, NoPeerRunning)
            for writer in kept:
                writer.close()

    kept: list[asyncio.StreamWriter] = []
    asyncio.run(scenario())
