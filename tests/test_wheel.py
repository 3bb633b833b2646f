"""The wheel: it holds what a user needs and nothing else, and works without the repository."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from molink.commands import EXTRAS

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of what the repository holds, so that build folders of other runs are left alone."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = ROOT / name, folder / "source" / name
        if source.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    built = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_every_package_with_its_types(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for package, folder in PACKAGES.items():
        for file in (ROOT / folder).glob("*.py"):
            assert f"{package.replace('.', '/')}/{file.name}" in names
        assert f"{package.replace('.', '/')}/py.typed" in names
    assert "molink/peer/wire/protocol/molink.proto" in names
    assert {f"molink/shards/native/{name}" for name in ("few_rows.c", "products.h", "steps.h")} <= names


def test_it_holds_the_bundled_model(wheel: zipfile.ZipFile) -> None:
    bundled = ROOT / "shards" / "models" / "tiny-shakespeare"
    files = [path for path in bundled.iterdir() if path.is_file()]
    assert {"config.json", "tokenizer.json"} <= {path.name for path in files}
    for path in files:
        stored = wheel.read(f"molink/shards/models/tiny-shakespeare/{path.name}")
        assert stored == path.read_bytes()


def test_it_holds_the_page_with_what_others_wrote_and_its_licences(wheel: zipfile.ZipFile) -> None:
    site = ROOT / "client" / "gateway" / "page" / "site"
    files = [path for path in site.rglob("*") if path.is_file()]
    assert {"index.html", "page.js", "purify.js", "LICENSE.dompurify.txt", "SHA256SUMS"} <= {
        path.name for path in files
    }
    for path in files:
        stored = wheel.read(f"molink/client/gateway/page/site/{path.relative_to(site).as_posix()}")
        assert stored == path.read_bytes()


def test_it_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    strays = [
        name
        for name in wheel.namelist()
        if not name.startswith(("molink/", "molink-")) or "tests" in name.split("/") or "/test_" in name
    ]
    assert strays == []


def test_it_declares_its_commands(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    declared = wheel.read(name).decode()
    for command, target in SETTINGS["project"]["scripts"].items():
        assert f"{command} = {target}" in declared


def test_a_volunteer_installs_neither_what_draws_nor_what_serves_http_nor_a_solver(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    needed = message_from_bytes(wheel.read(name)).get_all("Requires-Dist", [])
    for package, extra in EXTRAS.items():
        own = [line for line in needed if re.match(rf"{package}\b", line)]
        assert all(f'extra == "{extra}"' in line for line in own)
        assert own or package == "starlette"  # FastAPI's own


def test_it_works_from_anywhere_without_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'installed')!r})\n"
        "import molink, molink.routing\n"
        "from molink.shards.checkpoint import catalog\n"
        "print(molink.__file__)\n"
        "print(catalog.resolve('molink/tiny-shakespeare'))\n"
    )
    # -P: nothing of the working directory; the editable install's finder comes after sys.path.
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    home, model = done.stdout.splitlines()
    assert Path(home).is_relative_to(tmp_path)
    assert Path(model).is_relative_to(tmp_path)
