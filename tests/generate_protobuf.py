"""Makes the Python modules of the .proto files; without --write, checks that those checked in are current."""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"dht/records": "molink/dht/records", "peer/wire/protocol": "molink/peer/wire/protocol"}
"""Folder with .proto files: where it is installed, which is what import lines must say."""


def generate() -> dict[Path, str]:
    """The text of every generated file, by its path in this repository."""
    with tempfile.TemporaryDirectory() as name:
        source, output = Path(name) / "source", Path(name) / "output"
        output.mkdir()
        folders: dict[str, Path] = {}
        protos: list[str] = []
        for folder, package in PACKAGES.items():
            for proto in sorted((ROOT / folder).glob("*.proto")):
                staged = source / package / proto.name
                staged.parent.mkdir(parents=True, exist_ok=True)
                staged.write_bytes(proto.read_bytes())
                protos.append(f"{package}/{proto.name}")
                folders[package] = ROOT / folder
        _compile(source, output, protos)
        return {
            folders[path.parent.relative_to(output).as_posix()] / path.name: path.read_text(encoding="utf-8")
            for path in sorted(output.rglob("*_pb2.py*"))
        }


def _compile(source: Path, output: Path, protos: list[str]) -> None:
    plugins = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))  # protoc-gen-mypy
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={source}", f"--python_out={output}"]
    result = subprocess.run(
        [*command, f"--mypy_out={output}", *protos],
        env={**os.environ, "PATH": plugins},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if result.returncode:
        raise SystemExit(f"protoc refused the .proto files: {result.stderr.strip()}")


def outdated(generated: dict[Path, str]) -> list[Path]:
    """The files that differ from what is generated, or are missing."""
    return [
        path
        for path, text in generated.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Returns the exit status: 1 if a file is not current and --write was not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python tests/generate_protobuf.py --write"
    )
    parser.add_argument("--write", action="store_true", help="write the files in place")
    arguments = parser.parse_args()
    generated = generate()
    for path in outdated(generated):
        relative = path.relative_to(ROOT).as_posix()
        if not arguments.write:
            print(f"{relative} is not what its .proto file makes: run `make proto`", file=sys.stderr)
            return 1
        path.write_text(generated[path], encoding="utf-8", newline="\n")
        print(f"wrote {relative}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
