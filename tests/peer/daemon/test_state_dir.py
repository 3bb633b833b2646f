"""The state directory is held by one peer, survives it, and leaves nothing behind that it should not."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.configuration import SettingsError
from molink.dht.identity.identity import Identity
from molink.dht.records.bounds import MAX_SEQUENCE
from molink.peer.state_dir import StateDir, StateDirInUse, read_json, wait_until_free, write_json

HOLD = """
import sys
from pathlib import Path
from molink.peer.state_dir import StateDir
with StateDir(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    with StateDir(tmp_path / "a" / "peer") as state:
        assert state.path.is_dir()
        assert os.name == "nt" or state.path.stat().st_mode & 0o777 == 0o700


def test_a_second_holder_is_told_so_and_what_to_do(tmp_path: Path) -> None:
    with (
        StateDir(tmp_path),
        pytest.raises(StateDirInUse, match=r"already running with the state directory .*--state-dir"),
        StateDir(tmp_path),
    ):
        pass
    with StateDir(tmp_path) as state:  # free again
        state.remember_ports(4001, 4002)
        assert state.ports() == (4001, 4002)


def test_another_process_is_a_second_holder_until_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StateDirInUse), StateDir(tmp_path):
            pass
        assert not wait_until_free(tmp_path, 0.0)
        holder.kill()
        assert wait_until_free(tmp_path, 60.0)
    with StateDir(tmp_path) as state:
        assert state.path == tmp_path


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot be used .*--state-dir"), StateDir(tmp_path / "file"):
        pass


def test_a_control_file_of_a_killed_peer_goes_and_so_does_ones_own(tmp_path: Path) -> None:
    (tmp_path / "control.json").write_text("stale")
    with StateDir(tmp_path) as state:
        assert not state.control.exists()
        state.control.write_text("{}")
    assert not state.control.exists()


def test_ports_are_remembered(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        assert state.ports() == (None, None)
        state.remember_ports(4001, 4002)
    with StateDir(tmp_path) as state:
        assert state.ports() == (4001, 4002)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"libp2p": "4001"}', '{"libp2p": 0}', '{"grpc": 70000}', "\0"]
)
def test_damaged_ports_are_forgotten(tmp_path: Path, content: str) -> None:
    (tmp_path / "ports.json").write_text(content)
    assert StateDir(tmp_path).ports() == (None, None)


def test_a_file_is_replaced_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert read_json(path) == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert os.name == "nt" or path.stat().st_mode & 0o777 == 0o600


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, content)
    assert read_json(path) == content == json.loads(path.read_text())


def test_numbers_and_acquaintances_outlive_the_peer_and_are_for_this_user_alone(tmp_path: Path) -> None:
    founder, member, other = (
        f"/ip4/127.0.0.1/tcp/400{n}/p2p/{Identity.generate().peer_id}" for n in range(3)
    )
    with StateDir(tmp_path) as state:
        assert state.set_aside() == -1
        assert state.remembered((founder,)) == ()
        state.remember_set_aside(1_800_000_000_000)
        state.remember_swarm((founder,), (founder, member))
    with StateDir(tmp_path) as state:
        assert state.set_aside() == 1_800_000_000_000
        assert state.remembered((founder,)) == (member,)
        assert state.remembered((member,)) == (founder,)
        assert state.remembered((other,)) == ()
        for name in ("sequence.json", "swarm.json"):
            assert os.name == "nt" or (tmp_path / name).stat().st_mode & 0o777 == 0o600


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=20), st.lists))
def test_whatever_the_files_hold_is_addresses_and_a_number_or_left_out(content: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = StateDir(Path(folder))
        for name, keys in (("sequence.json", ("set_aside",)), ("swarm.json", ("entrances", "addresses"))):
            (Path(folder) / name).write_text(json.dumps(dict.fromkeys(keys, content)))
        assert -1 <= state.set_aside() <= MAX_SEQUENCE
        assert state.remembered((f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity.generate().peer_id}",)) == ()
