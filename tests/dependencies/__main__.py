"""Installs the oldest and the newest releases that `pyproject.toml` allows, and tries the product on them.

Each environment is installed from its list, `lowest.txt` or `newest.txt`, which `--write` resolves anew. Both hold for
every Python that `requires-python` allows. The installer is uv, without its own or pip's configuration, variables and
links, so that packages come from PyPI as a user gets them.

In full, each environment gets PyPI's torch, which on Linux is 3 GB with CUDA's libraries, and runs `molink demo` and
the tests of the model stage. `--core` imports every module and lets two peers generate. It takes the torch that this
program's own environment has, so it tries every bound but torch's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "dependencies"
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
EXTRAS = ("postgresql", "simnet", "quantization", "grammars", "traces")
TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")
MODEL_STAGE = ("tests/shards/model", "tests/shards/batching", "tests/shards/kernels/test_fused_layers.py")
WITH_TORCH = ("torch", "triton", "cuda-", "nvidia-c", "nvidia-n")
"""How names of torch, and of what only torch's build for CUDA needs, begin."""
NOT_WITH_TORCH = ("nvidia-ml-py",)
CONFIGURES = ("PIP_", "UV_", "PYTHON", "VIRTUAL_ENV")


def clean_environment() -> dict[str, str]:
    """Variables of this process without those that configure pip, uv or Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CONFIGURES)}
    return kept | {"UV_NO_CONFIG": "1", "PIP_CONFIG_FILE": os.devnull}


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Runs a command to its end. Raises CalledProcessError if it fails."""
    print("$", *command, flush=True)
    subprocess.run(command, cwd=folder, env=clean_environment(), check=True)


def uv(*arguments: str | Path) -> None:
    run(sys.executable, "-m", "uv", "--quiet", *arguments)


def write_lists() -> None:
    """Resolves both lists anew from what PyPI has now."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    form = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--upgrade")
    for name, resolution in RESOLUTIONS.items():
        out = ("--resolution", resolution, "--output-file", FOLDER / f"{name}.txt")
        uv("pip", "compile", *form, *extras, *out, ROOT / "pyproject.toml")


def belongs_to_torch(line: str) -> bool:
    return line.startswith(WITH_TORCH) and not line.startswith(NOT_WITH_TORCH)


def install(name: str, *, core: bool) -> Path:
    """Makes an environment of a list, with this tree's package. Returns its folder of programs."""
    home = BUILD / name
    uv("venv", "--clear", "--python", sys.executable, home)
    listed = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    wanted = BUILD / f"{name}-installed.txt"
    wanted.write_text("".join(line for line in listed if not (core and belongs_to_torch(line))))
    programs = home / ("Scripts" if sys.platform == "win32" else "bin")
    into = ("--python", programs / "python")
    without = ("--no-deps",) if core else ()
    uv("pip", "install", *into, *without, "--requirements", wanted)
    uv("pip", "install", *into, "--no-deps", ROOT)
    if core:
        lend_torch(programs / "python")
    return programs


def lend_torch(python: Path) -> None:
    """Lets an environment import the torch that this program's own has, and nothing else of it."""
    lent = BUILD / "torch"
    shutil.rmtree(lent, ignore_errors=True)
    lent.mkdir()
    torch = distribution("torch")
    for top in sorted(
        {path.parts[0] for path in torch.files or () if path.parts[0] not in ("..", "__pycache__")}
    ):
        (lent / top).symlink_to(Path(str(torch.locate_file(top))))
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "lent_torch.pth").write_text(f"{lent}\n")


def try_core(programs: Path) -> None:
    """Imports every module; two peers generate."""
    run(programs / "python", "-P", FOLDER / "core.py", folder=BUILD)


def try_all(programs: Path) -> None:
    """Runs the core, the demonstration and the tests of the model stage, whose tools are those of `constraints.txt`."""
    try_core(programs)
    run(programs / "molink", "demo", "--peers", "4", folder=BUILD)
    constraints = ("--constraints", ROOT / "constraints.txt")
    uv("pip", "install", "--python", programs / "python", *constraints, *TEST_TOOLS)
    # Warnings of old libraries are not errors here, and options that need further tools are left out.
    options = ("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default")
    run(
        programs / "python",
        "-P",
        "-m",
        "pytest",
        "-q",
        *options,
        "-m",
        "not full and not attack",
        *MODEL_STAGE,
    )


def trials(names: Iterator[str], *, core: bool) -> None:
    for name in names:
        began_s = time.monotonic()
        programs = install(name, core=core)
        installed_s = time.monotonic()
        (try_core if core else try_all)(programs)
        ended_s = time.monotonic()
        print(
            f"{name}: installed in {installed_s - began_s:.0f} s, tried in {ended_s - installed_s:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=(*RESOLUTIONS, []), help="lists to try (default: all)")
    parser.add_argument("--write", action="store_true", help="resolve the lists anew, and try nothing")
    parser.add_argument("--core", action="store_true", help="only import, and generate with two peers")
    options = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    if options.write:
        write_lists()
    else:
        trials(iter(options.names or RESOLUTIONS), core=options.core)


if __name__ == "__main__":
    main()
