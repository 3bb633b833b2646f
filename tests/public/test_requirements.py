"""A library that is present and broken gives one sentence: its name, its version, and the command that mends it."""

import importlib
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer

from molink.commands import run_app
from molink.requirements import broken_library, untried
from molink.shards.errors import UnsupportedArchitecture

BROKEN = {
    "a name that it lacks": ("xxhash", "xxhash", "from xxhash import nothing_of_this_name"),
    "a symbol that its own library lacks": (
        "psutil",
        "psutil",
        "raise ImportError('/lib/_psutil.so: undefined symbol: x')",
    ),
    "an error of its own": ("google", "protobuf", "raise RuntimeError('Detected incompatible gencode')"),
    "a system library that it lacks": ("torch", "torch", "raise OSError('libcudart.so: cannot open')"),
}


def imported(module: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports a module of this code in place of the library."""
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        __import__(module)  # as the statement does, of which a traceback shows fewer frames than of importlib
    finally:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_library_is_named_with_what_mends_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, distribution, code = BROKEN[kind]
    app = typer.Typer()

    @app.command()
    def command() -> None:
        imported(module, code, tmp_path, monkeypatch)

    assert run_app(app, "molink", [], bare=True) == 1
    (line,) = capsys.readouterr().err.splitlines()
    version = metadata.version(distribution)
    assert line.startswith(f"molink: {distribution} {version} is installed and cannot be used (")
    assert f": pip install --force-reinstall '{distribution}" in line


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "xxhash":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("xxhash")
    assert str(broken_library(caught.value)).startswith("xxhash is not installed: pip install 'xxhash>=")


def test_other_errors_are_not_laid_on_a_library() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert broken_library(caught.value) is None


def test_a_missing_module_of_our_own_is_not_laid_on_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        imported("xxhash", "import molink.nothing_of_this_name", tmp_path, monkeypatch)
    assert broken_library(caught.value) is None


def test_a_refused_architecture_says_which_transformers_were_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert untried("transformers") is None
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "5.99.0" if name == "transformers" else real(name))
    message = str(UnsupportedArchitecture(Path("model"), "llama", "its layers take no cache"))
    assert "its layers take no cache; transformers 5.99.0 was not tried, " in message
    assert "pip install 'transformers" in message
