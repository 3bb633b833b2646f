"""The report for maintainers says what runs, and not whose machine it is."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest

from molink.peer.commands import cli
from molink.peer.commands.report import PACKAGES, cleaned, report_of
from molink.peer.compute.native_ways import DroppedWay, NativeWay, TriedWay, WaysRecord
from molink.shards.native.compiling import user_folder
from molink.shards.native.native_way import TrialJob

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
KEY = "4f3c2b1a9d8e7f60514233241506f7e8d9cabbac0d1e2f3041526374859607f8"
ADDRESS = "203.0.113.77"


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that a peer that has died twice leaves, with as much of its owner in it as could be."""
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("USER", "erika")
    monkeypatch.setenv("HOSTNAME", "erikas-pc.example.org")
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "erika"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home" / "erika"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("MKL_NOTE", f"/home/erika/mkl of erika at {ADDRESS}:4001")
    folder = tmp_path / "home" / "erika" / "state"
    folder.mkdir(parents=True)
    (folder / "identity.key").write_text(KEY)
    (folder / "swarm.json").write_text(json.dumps({"addresses": [f"/ip4/{ADDRESS}/tcp/4001/p2p/{PEER}"]}))
    (folder / "control.json").write_text(json.dumps({"port": 1, "token": KEY, "pid": 1}))
    death = {
        "at_s": 1.8e9,
        "signal": "SIGSEGV",
        "place": "/home/erika/own.py line 3",
        "ways": ["int8", f"/ip4/{ADDRESS}/tcp/4001/p2p/{PEER}", KEY],
        "software": "molink 0",
    }
    (folder / "deaths.json").write_text(json.dumps({"deaths": [death]}))
    job = TrialJob(NativeWay.TORCH_BYTES, "int8", "bfloat16", 64, 64, 0, (1,), 1)
    WaysRecord(
        WaysRecord.read(user_folder()).machine,
        (TriedWay(job, 12.5e9),),
        (DroppedWay(NativeWay.COMPILED, "ended the process by SIGILL in /home/erika/few_rows.so"),),
        (NativeWay.TORCH_BYTES, NativeWay.ATTENTION),
    ).write(user_folder())
    frame = b'Current thread 0x0 (most recent call first):\n  File "/home/erika/own.py", line 3 in f\n'
    (folder / "faults.log").write_bytes(
        b'ways ["few_rows"]\nFatal Python error: Illegal instruction\n\n' + frame
    )
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    return out


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_report_names_no_user_host_address_folder_or_key(
    form: list[str], state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "erikas-pc")
    out = run(capsys, "doctor", "--report", "--state-dir", state_dir, *form)
    for private in (
        "erika",
        "example.org",
        ADDRESS,
        PEER,
        KEY,
        str(state_dir),
        str(state_dir.parent),
        "home",
    ):
        assert private not in out, private


def test_a_report_says_what_runs_here(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "doctor", "--report", "--json", "--state-dir", state_dir))
    assert {"python", "system", "libc", *PACKAGES} == report["versions"].keys()
    assert report["versions"]["torch"] == __import__("importlib.metadata").metadata.version("torch")
    assert report["processor"]["processors"] == os.cpu_count()
    assert report["processor"]["usable_processors"] >= 1
    assert report["memory"]["total_bytes"] >= report["memory"]["offered_bytes"] > 0
    assert report["environment"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    first, second = report["deaths"]
    assert report["ways"] == {
        "chosen": {"torch's int8 product": "12.5 GB/s", "torch's fused attention": "not measured"},
        "tried": ["torch's int8 product"],
        "dropped": {"the compiled product of few rows": "ended the process by SIGILL in …"},
        "left_out_after_deaths": [],
    }
    assert first["death"].startswith("SIGSEGV at 2027-01-15 08:00 UTC")
    assert not first["same_software"]
    assert second["death"].startswith("SIGILL at ")
    assert second["death"].endswith(" in own.py line 3")
    assert second["ways"] == ["few_rows"]
    text = run(capsys, "doctor", "--report", "--state-dir", state_dir)
    assert "\nprocessor:\n  name: " in text
    assert "SIGILL at " in text


def test_a_report_is_there_before_the_first_start(tmp_path: Path) -> None:
    report = report_of(tmp_path / "none")
    assert report["deaths"] == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("gave wrong numbers with 4 rows (512 x 64, int8 with bfloat16)",) * 2,
        ("ended the process by SIGSEGV", "ended the process by SIGSEGV"),
        ("torch/_ops.py line 1123", "torch/_ops.py line 1123"),
        ("at 2027-01-15 08:00 UTC", "at 2027-01-15 08:00 UTC"),
        ("cannot read C:\\Users\\erika\\x.bin", "cannot read …"),
        ("cannot read /srv/own/.cache/x, sorry", "cannot read …, sorry"),
        ("to fe80::1:2:3 now", "to … now"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) CPU @ 2.20GHz"),
    ],
)
def test_only_what_names_somebody_is_left_out(text: str, kept: str) -> None:
    assert cleaned(text, ["erika"]) == kept
    assert cleaned(f"{getpass.getuser()}s", [getpass.getuser()]) == f"{getpass.getuser()}s"
