"""Files for deployment have the form that their readers ask for, and every command line in them is one of ours."""

import configparser
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.deployment.command_lines import PROGRAMS, commands_in, fault_of

FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
MANIFESTS = sorted(
    path for path in (FOLDER / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml"
)
KUBERNETES = "1.33"


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text("utf-8"))


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
    return content


def containers() -> Iterator[dict[str, Any]]:
    for manifest in manifests():
        pod = manifest.get("spec", {}).get("template", {}).get("spec", {})
        yield from (*pod.get("initContainers", ()), *pod.get("containers", ()))


def substituted(word: str) -> str:
    """With what stands for a value that its reader puts in."""
    word = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)
    return re.sub(r"\$\{[^}]*\}|\$\(\w+\)", "value", word)


def in_image() -> Iterator[list[str]]:
    for instruction in re.findall(
        r"^(?:CMD|ENTRYPOINT) (\[.*\])", (FOLDER / "Dockerfile").read_text(), re.MULTILINE
    ):
        yield json.loads(instruction)


def in_compose() -> Iterator[list[str]]:
    for service in compose()["services"].values():
        command = service.get("command", [])
        yield shlex.split(substituted(command)) if isinstance(command, str) else command
        kind, *probe = service.get("healthcheck", {}).get("test", ["NONE"])
        yield from commands_in(probe[0]) if kind == "CMD-SHELL" else [probe]


def in_kubernetes() -> Iterator[list[str]]:
    for container in containers():
        yield [*container["command"], *container.get("args", ())]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container.get(probe, {}).get("exec", {}).get("command", [])
            yield from commands_in(command[2]) if command[:2] == ["sh", "-c"] else [command]


def in_units() -> Iterator[list[str]]:
    for path in (FOLDER / "systemd").iterdir():
        for line in re.findall(r"^ExecStart=(.*)", path.read_text("utf-8"), re.MULTILINE):
            program, *options = shlex.split(line)
            yield [program.rpartition("/")[2], *options]


def in_script() -> Iterator[list[str]]:
    text = (FOLDER / "rented/join.sh").read_text("utf-8")
    for line in re.findall(r'^\s*"\$home/venv/bin/(molink-peer" .*?) &$', text, re.MULTILINE):
        yield shlex.split(line.replace('"', "", 1))


def in_comments() -> Iterator[list[str]]:
    for path in FOLDER.rglob("*"):
        if path.suffix in (".yaml", ".conf", ".service", ".sh") or path.name == "Dockerfile":
            text = path.read_text("utf-8")
            for line in re.findall(r"^\s*#.*?((?:molink|molink-peer|molink-gateway) .*)", text, re.MULTILINE):
                if line.split()[1] in ("keys", "join", "service", "--port"):
                    yield from commands_in(line.replace("`", " ; "))


FOUND = {
    find.__name__: [words for words in find() if words and words[0] in PROGRAMS]
    for find in (in_image, in_compose, in_kubernetes, in_units, in_script, in_comments)
}
LINES = [(place, words) for place, found in FOUND.items() for words in found]


def test_command_lines_are_found_in_each_kind_of_file() -> None:
    assert {place: len(found) for place, found in FOUND.items() if not found} == {}
    assert len(LINES) >= 15


@pytest.mark.parametrize(
    ("place", "words"), LINES, ids=lambda value: value if isinstance(value, str) else None
)
def test_every_command_line_is_taken_by_its_program(place: str, words: list[str]) -> None:
    assert fault_of([substituted(word) for word in words]) is None, (place, words)


@pytest.mark.parametrize(
    "words",
    [["molink-peer", "join", "--no-such-option"], ["molink-peer", "jion"], ["molink-peer", "join", "--dtype", "float"],
     ["molink-gateway", "--port", "http"], ["molink-peer", "join", "--grpc-port", "70000"]],
)  # fmt: skip
def test_a_command_line_that_is_wrong_would_be_noticed(words: list[str]) -> None:
    assert fault_of(words)


def test_the_compose_file_is_valid() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml"],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def test_services_mount_only_volumes_and_files_that_there_are() -> None:
    content = compose()
    for service in content["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (FOLDER / source).exists() if source.startswith(".") else source in content["volumes"], (
                volume
            )


@pytest.mark.parametrize(
    "manifest", list(manifests()), ids=lambda one: f"{one['kind']} {one['metadata']['name']}"
)
def test_each_manifest_is_what_kubernetes_takes(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_selectors_labels_and_names_of_manifests_fit_together() -> None:
    named = {(one["kind"], one["metadata"]["name"]) for one in manifests()}
    for one in manifests():
        spec = one.get("spec", {})
        if "template" in spec:
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
    for container in containers():
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in named
    listed = yaml.safe_load((FOLDER / "kubernetes/kustomization.yaml").read_text("utf-8"))["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]


def test_a_peer_in_a_container_has_the_time_that_draining_takes() -> None:
    from molink.peer.memory.lease_gate import DRAIN_S

    (daemons,) = [one for one in manifests() if one["kind"] == "DaemonSet"]
    assert daemons["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
    assert int(compose()["x-molink"]["stop_grace_period"].removesuffix("s")) > DRAIN_S
    unit = (FOLDER / "systemd/molink-peer.service").read_text("utf-8")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > DRAIN_S


def test_nothing_of_ours_is_started_for_ever() -> None:
    for path in (FOLDER / "systemd").iterdir():
        unit = configparser.ConfigParser(interpolation=None)
        unit.read_string(path.read_text("utf-8"))
        within_s, starts = (int(unit["Unit"][key]) for key in ("StartLimitIntervalSec", "StartLimitBurst"))
        assert starts * int(unit["Service"]["RestartSec"]) < within_s, path.name
    services = compose()["services"]
    for name in ("founder", "peer", "gateway"):
        assert re.fullmatch(r"on-failure:\d", services[name]["restart"]), name


def test_what_the_image_installs_and_names_there_is() -> None:
    import tomllib

    text = (FOLDER / "Dockerfile").read_text("utf-8")
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    names = set(re.findall(r"^[A-Z]+", text, re.MULTILINE)) - {
        "FROM",
        "ARG",
        "ENV",
        "RUN",
        "COPY",
        "WORKDIR",
        "USER",
    }
    assert names <= {"CMD", "EXPOSE", "VOLUME", "STOPSIGNAL"}
    from molink.options import declared_options

    for variable in re.findall(r"MOLINK_([A-Z_]+)=", text):
        assert variable.lower() in declared_options()


def test_the_script_for_rented_containers_is_clean() -> None:
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--severity=style", FOLDER / "rented/join.sh"],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
