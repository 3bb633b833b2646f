"""Service files: what has a system start a peer with its user, and start it again when it has failed.

systemd.service(5), launchd.plist(5), and Windows' Task Scheduler Schema (MS-TSCH, section 2.5). The first two end a
peer as Ctrl-C does once, and then wait for DRAIN_S: sessions that run end as they should.
"""

import plistlib
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

DRAIN_S = 120
AGAIN_S = 30
"""Between an end that was a failure and the next start."""
STARTS = 5
WITHIN_S = 600
"""After so many starts within this time the system starts the peer no more: what ends it again and again does so for
a reason. Launchd has no such limit."""
SYSTEMS = ("linux", "darwin", "windows")


def service_file(system: str, command: Sequence[str]) -> str:
    """Returns the content of the file that has `system` (one of SYSTEMS) run `command` for the user who installs it."""
    if system == "darwin":
        return _property_list(command)
    return _task(command) if system == "windows" else _unit(command)


def _unit(command: Sequence[str]) -> str:
    words = " ".join(f'"{_systemd_escaped(word)}"' for word in command)
    return f"""\
[Unit]
Description=MoLink peer
StartLimitIntervalSec={WITHIN_S}
StartLimitBurst={STARTS}

[Service]
ExecStart={words}
Restart=on-failure
RestartSec={AGAIN_S}
# Settings that are wrong stay so.
RestartPreventExitStatus=2
TimeoutStopSec={DRAIN_S}

[Install]
WantedBy=default.target
"""


def _systemd_escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")


def _property_list(command: Sequence[str]) -> str:
    log = str(Path.home() / "Library" / "Logs" / "molink-peer.log")
    content = {
        "Label": "molink-peer",
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": AGAIN_S,
        "ExitTimeOut": DRAIN_S,
        "ProcessType": "Background",
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(content, sort_keys=False).decode()


def _task(command: Sequence[str]) -> str:
    program, *arguments = command
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <Triggers><LogonTrigger><Enabled>true</Enabled></LogonTrigger></Triggers>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure><Interval>PT1M</Interval><Count>{STARTS}</Count></RestartOnFailure>
  </Settings>
  <Actions>
    <Exec><Command>{escape(program)}</Command><Arguments>{escape(" ".join(arguments))}</Arguments></Exec>
  </Actions>
</Task>
"""
