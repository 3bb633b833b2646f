"""The page as it is served: every file from here, under a policy that lets nothing else in, and kept as long as it
may be."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from support.swarms.fake_swarm import error_of

from molink.client.gateway.page.page_files import read_page_files

SITE = Path(str(files("molink.client.gateway.page"))) / "site"
VENDOR = SITE / "vendor"


def test_what_others_wrote_is_byte_for_byte_what_was_pinned() -> None:
    pinned = dict(
        reversed(line.split("  ")) for line in (VENDOR / "SHA256SUMS").read_text("utf-8").splitlines()
    )
    there = {path.name: path for path in VENDOR.iterdir() if path.name not in ("SHA256SUMS", "README.md")}
    assert set(there) == set(pinned)
    for name, path in there.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == pinned[name], name


def test_each_module_of_others_has_its_licence_beside_it() -> None:
    said = (VENDOR / "README.md").read_text("utf-8")
    assert all(f"`{path.name}`" in said for path in VENDOR.glob("*.js"))
    assert {"LICENSE.htm.txt", "LICENSE.preact.txt", "LICENSE.markdown-it.txt", "LICENSE.dompurify.txt"} <= {
        path.name for path in VENDOR.glob("LICENSE.*")
    }


def test_every_module_that_is_imported_is_there_and_none_from_elsewhere() -> None:
    for path in SITE.glob("*.js"):
        for name in re.findall(r"""(?:from|import\() ?["']([^"']+)["']""", path.read_text("utf-8")):
            assert name.startswith("./"), f"{path.name}: {name}"
            assert (SITE / name).is_file(), f"{path.name}: {name}"


def test_no_script_or_style_stands_in_the_index_itself(http: httpx.Client) -> None:
    page = http.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert re.findall(r"""(?:src|href)="(?!/page/)([^"]*)""", page) == []


def test_the_policy_lets_in_nothing_inline_and_nothing_from_elsewhere(http: httpx.Client) -> None:
    response = http.get("/")
    policy = dict(
        part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";")
    )
    assert "unsafe" not in str(policy)
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_files_of_this_version_are_kept_for_ever_and_the_index_is_asked_for_again(http: httpx.Client) -> None:
    index = http.get("/")
    assert index.headers["cache-control"] == "no-cache"
    assert http.get("/", headers={"If-None-Match": index.headers["etag"]}).status_code == 304
    paths = re.findall(r'(?:src|href)="(/page/[^"]+)"', index.text)
    assert len(paths) > 4
    for path in paths:
        served = http.get(path)
        assert served.status_code == 200
        assert "immutable" in served.headers["cache-control"]
        assert served.headers["x-content-type-options"] == "nosniff"


def test_a_page_of_another_version_gets_this_ones_files_and_does_not_keep_them(http: httpx.Client) -> None:
    served = http.get("/page/0123456789abcdef/page.js")
    assert (served.status_code, served.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize("deflated", ["gzip", "identity"])
def test_whoever_takes_no_gzip_gets_the_same_bytes_without(http: httpx.Client, deflated: str) -> None:
    served = http.get("/page/x/page.css", headers={"Accept-Encoding": deflated})
    assert served.content == (SITE / "page.css").read_bytes()
    assert served.headers["content-type"] == "text/css; charset=utf-8"
    assert served.headers["vary"] == "Accept-Encoding"
    assert (served.headers.get("content-encoding") == "gzip") == (deflated == "gzip")


@pytest.mark.parametrize(
    "path", ["nothing.js", "index.html", "%2e%2e/routes.py", "..%2froutes.py", "vendor", "//etc/passwd"]
)
def test_nothing_but_the_pages_files_is_served(http: httpx.Client, path: str) -> None:
    response = http.get(f"/page/x/{path}")
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


def test_a_changed_file_is_under_another_path() -> None:
    page = read_page_files()
    assert re.fullmatch(r"[0-9a-f]{16}", page.version)
    assert f"/page/{page.version}/page.js".encode() in page.index.content
    assert b"ASSETS" not in page.index.content
