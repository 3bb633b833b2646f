"""Files of the page, as they lie in the package: read once, each with what a browser must know of it."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

INDEX: Final = "index.html"
_PLACE: Final = "ASSETS"
"""Stands in the index for the path under which this version's other files are."""
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """Page file: its bytes, plain and deflated, and its type."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True)
class PageFiles:
    """Page files of one version."""

    version: str
    """Of all their contents: it is part of their paths, so that a browser may keep them for ever."""
    by_path: Mapping[str, PageFile]

    @property
    def index(self) -> PageFile:
        return self.by_path[INDEX]


@cache
def read_page_files() -> PageFiles:
    """Reads all files of the page from the package, once in a process."""
    contents = dict(sorted(_contents(files("molink.client.gateway.page") / "site", "").items()))
    whole = hashlib.sha256()
    for path, content in contents.items():
        whole.update(f"{path} {len(content)}\n".encode() + content)
    version = whole.hexdigest()[:16]
    contents[INDEX] = contents[INDEX].replace(_PLACE.encode(), f"/page/{version}".encode())
    return PageFiles(version, {path: _page_file(path, content) for path, content in contents.items()})


def _contents(folder: Traversable, prefix: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _contents(entry, f"{prefix}{entry.name}/")
        elif _suffix(entry.name) in _TYPES:
            found[f"{prefix}{entry.name}"] = entry.read_bytes()
    return found


def _page_file(path: str, content: bytes) -> PageFile:
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return PageFile(content, gzip.compress(content, 9, mtime=0), _TYPES[_suffix(path)], etag)


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
