"""The configuration file as `molink config` changes it."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molink.configuration import SettingsError, read_file
from molink.configuration_file import named_option, remove_option, settings_in_force, write_option
from molink.options import declared_options

ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "config.toml"
    monkeypatch.setenv("MOLINK_CONFIG", str(path))
    for name in declared_options():
        monkeypatch.delenv(f"MOLINK_{name.upper()}", raising=False)
    return path


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("memory", ["10GB"], "10GB"), ("grpc_port", ["4002"], 4002), ("new_swarm", ["on"], True),
        ("wait", ["2.5"], 2.5), ("dtype", ["float32"], "float32"), ("swarm_key", ["/k"], "/k"),
        ("quiet_hours", ["22:00-07:00", "12:00-13:00"], ["22:00-07:00", "12:00-13:00"]),
        ("initial_peers", [ADDRESS], [ADDRESS]),
    ],
)  # fmt: skip
def test_what_is_written_is_what_a_peer_reads(file: Path, name: str, words: list[str], value: object) -> None:
    write_option(name, words)
    assert tomllib.loads(file.read_text("utf-8")) == {name: value}
    assert settings_in_force()[name] == (read_file()[name], "file")


def test_what_its_owner_wrote_beside_stays(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('# mine\nmemory = "4GB"  # not more\n\nthreads = 2\n', "utf-8")
    write_option("memory", ["8GB"])
    write_option("region", ["DE"])
    assert remove_option("threads")
    assert not remove_option("threads")
    assert file.read_text("utf-8").startswith('# mine\nmemory = "8GB"  # not more\n')
    assert read_file() == {"memory": "8GB", "region": "DE"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("grpc_port", ["x"]), ("grpc_port", ["70000"]), ("dtype", ["float"]), ("memory", ["1GB", "2GB"]),
     ("initial_peers", ["nowhere"]), ("new_swarm", ["perhaps"]), ("region", [""])],
)  # fmt: skip
def test_what_the_option_does_not_take_changes_nothing(file: Path, name: str, words: list[str]) -> None:
    write_option("memory", ["4GB"])
    before = file.read_text("utf-8")
    with pytest.raises(SettingsError):
        write_option(name, words)
    assert file.read_text("utf-8") == before


def test_a_file_that_is_wrong_is_left_as_it_is(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("memory = [", "utf-8")
    with pytest.raises(SettingsError, match="is not valid TOML"):
        write_option("threads", ["2"])
    assert file.read_text("utf-8") == "memory = ["


def test_the_environment_goes_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_option("threads", ["2"])
    monkeypatch.setenv("MOLINK_THREADS", "3")
    monkeypatch.setenv("MOLINK_INITIAL_PEERS", ADDRESS)
    settings = settings_in_force()
    assert settings["threads"] == (3, "environment")
    assert settings["initial_peers"] == ((ADDRESS,), "environment")
    assert settings["priority"] == ("low", "default")


def test_an_option_is_known_by_the_name_that_it_has_on_a_command_line() -> None:
    assert named_option("--quiet-hours") == named_option("quiet_hours") == "quiet_hours"
    with pytest.raises(SettingsError, match="did you mean `memory`"):
        named_option("memoryy")


@given(text=st.text(min_size=1, max_size=32))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_as_it_was_written(file: Path, text: str) -> None:
    try:
        write_option("region", [text])
    except (SettingsError, UnicodeEncodeError):
        return
    assert read_file()["region"] == text
