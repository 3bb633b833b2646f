"""What has a system start a peer with its user is in the system's own form, and runs the program that printed it."""

import configparser
import plistlib
import shlex
import sys
from xml.etree import ElementTree as ET

import pytest

from molink.peer.commands import cli
from molink.peer.commands.service import AGAIN_S, DRAIN_S, STARTS, WITHIN_S, service_file

COMMAND = (sys.executable, "-m", "molink.peer", "join")
ODD = ("/home/a b/100%/py$thon", 'say "hi"')
TASK = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["service", *arguments])
    return int(str(ended.value.code)), *capsys.readouterr()


def test_a_unit_of_systemd_starts_this_program_drains_it_and_does_not_repeat_a_mistake(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = printed(capsys, "--system", "linux")
    assert code == 0
    assert "with the settings of " in err
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(out)
    service = unit["Service"]
    assert shlex.split(service["ExecStart"]) == list(COMMAND)
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    limit = (unit["Unit"]["StartLimitIntervalSec"], unit["Unit"]["StartLimitBurst"])
    assert limit == (str(WITHIN_S), str(STARTS))
    assert STARTS * AGAIN_S < WITHIN_S  # else no number of failures would reach the limit
    assert (service["RestartSec"], service["TimeoutStopSec"]) == (str(AGAIN_S), str(DRAIN_S))
    assert unit["Install"]["WantedBy"] == "default.target"


def test_what_systemd_would_expand_stays_as_it_is() -> None:
    (line,) = [line for line in service_file("linux", ODD).splitlines() if line.startswith("ExecStart=")]
    assert line == 'ExecStart="/home/a b/100%%/py$$thon" "say \\"hi\\""'


def test_a_property_list_of_launchd_starts_this_program_and_again_if_it_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = plistlib.loads(printed(capsys, "--system", "darwin")[1].encode())
    assert content["ProgramArguments"] == list(COMMAND)
    assert content["RunAtLoad"] is True
    assert content["KeepAlive"] == {"SuccessfulExit": False}
    assert content["ExitTimeOut"] == DRAIN_S


def test_a_task_of_windows_starts_this_program_when_its_user_comes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--system", "windows")[1]
    task = ET.fromstring(text.encode("utf-16"))  # noqa: S314 - we wrote it
    run = task.find(f"{TASK}Actions/{TASK}Exec")
    assert run is not None
    assert [part.text for part in run] == [sys.executable, "-m molink.peer join"]
    assert task.find(f"{TASK}Triggers/{TASK}LogonTrigger") is not None


def test_a_system_that_is_not_known_is_a_bad_argument(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = printed(capsys, "--system", "beos")
    assert (code, out) == (2, "")
    assert "linux, darwin, windows" in err
