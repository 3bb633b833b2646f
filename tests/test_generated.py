"""What protoc makes is checked in, so that nobody needs protoc to install; it must be current."""

from pathlib import Path

import generate_protobuf
import pytest


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    return generate_protobuf.generate()


def test_the_checked_in_modules_are_what_the_proto_files_make(generated: dict[Path, str]) -> None:
    assert generate_protobuf.outdated(generated) == []


def test_every_proto_file_gives_a_module_and_its_types(generated: dict[Path, str]) -> None:
    protos = [
        proto
        for folder in generate_protobuf.PACKAGES
        for proto in (generate_protobuf.ROOT / folder).glob("*.proto")
    ]
    assert len(protos) >= 2
    expected = {
        proto.with_name(proto.stem + suffix) for proto in protos for suffix in ("_pb2.py", "_pb2.pyi")
    }
    assert set(generated) == expected


def test_a_changed_module_is_noticed(generated: dict[Path, str]) -> None:
    path = next(iter(generated))
    assert generate_protobuf.outdated({**generated, path: generated[path] + "\n"}) == [path]
