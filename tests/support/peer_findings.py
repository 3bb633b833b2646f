"""What peers find out of this machine and of models before they serve, kept for those that start after them.

To measure a model, check its layers and try what can run them takes a processor up to six seconds: as long as a test of
many peers. A user's peer remembers all of it in its state directory. Here each new one begins with what any peer of the
tests has found out, in this process, in another or in an earlier run of this very source: other sources, other
findings.
"""

import atexit
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

KEPT_S = 24 * 3600.0
"""What is known of files of one run's own folders is of no use to later ones."""
SOURCES = (".py", ".cpp", ".h")
FOLDER = "MOLINK_TESTS_FINDINGS"
"""The variable that names the folder, in this process and in those that it starts."""


def use_findings(kept: Path, package: Path) -> None:
    """Names the folder of this source's findings, in `kept`; those of other sources are deleted."""
    folder = kept / source_hash(package)
    for other in kept.iterdir():
        if other != folder or time.time() - other.stat().st_ctime > KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
    os.environ[FOLDER] = str(folder)


def source_hash(package: Path) -> str:
    """Of all source of a package: SHA-256 over paths, sizes and contents."""
    found = sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCES):
        content = path.read_bytes()
        found.update(f"{path.relative_to(package)} {len(content)} ".encode() + content)
    return found.hexdigest()


@cache
def findings_folder() -> Path:
    """As named, else one of this process alone."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def found(kind: str) -> Iterable[Path]:
    return (findings_folder() / kind).glob("*.json")


def remind(state_dir: Path) -> None:
    """Makes the state directory of a peer that has been started before."""
    digests = state_dir / "digests"
    digests.mkdir(mode=0o700, parents=True, exist_ok=True)
    state_dir.chmod(0o700)
    profiles: dict[str, object] = {}
    for path in found("profiles"):
        profiles.update(json.loads(path.read_text(encoding="utf-8")))
    (state_dir / "profiles.json").write_text(json.dumps(profiles), encoding="utf-8")
    for path in found("digests"):
        shutil.copyfile(path, digests / path.name)


def remember(state_dir: Path) -> None:
    """Keeps what a peer has found out by now."""
    profiles = json.loads((state_dir / "profiles.json").read_text(encoding="utf-8"))
    for key, profile in profiles.items():
        name = sha256(key.encode()).hexdigest()
        _keep("profiles", f"{name}.json", json.dumps({key: profile}).encode())
    for path in (state_dir / "digests").glob("*.json"):
        _keep("digests", path.name, path.read_bytes())


def _keep(kind: str, name: str, content: bytes) -> None:
    """Writes a file at once, beside others that may write it too."""
    folder = findings_folder() / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if not path.exists() or path.read_bytes() != content:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
