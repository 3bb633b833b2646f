"""What the suite needs of a machine that has torch and little else: packages from a folder of wheels, and this
checkout as the package `molink`. Standard library only."""

import io
import lzma
import os
import re
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
_TESTS = CHECKOUT / "tests"


def unpack_wheels(wheels: Path, target: Path) -> tuple[str, ...]:
    """Unpacks all wheels of a folder, plain or packed by `pack_wheels.py`, into one that can be put on `sys.path`, and
    returns their names.

    Raises:
        ValueError: there are none, or one is not a wheel.
    """
    found = sorted([*wheels.glob("*.whl"), *wheels.glob("*.whl.xz")])
    if not found:
        raise ValueError(f"{wheels} holds no wheels: fill it with tests/gpu/wheels/wheels.sh {wheels}")
    for wheel in found:
        try:
            raw = wheel.read_bytes()
            whole = lzma.decompress(raw) if wheel.suffix == ".xz" else raw
            with zipfile.ZipFile(io.BytesIO(whole)) as archive:
                archive.extractall(target)
        except (zipfile.BadZipFile, lzma.LZMAError) as error:
            raise ValueError(f"{wheel} is no wheel ({error}): delete it and fetch it anew") from error
    return tuple(wheel.name for wheel in found)


def link_package(target: Path) -> None:
    """Makes `import molink` find this checkout, as an editable install does, but without links: Windows lets few users
    make them. The metadata are what `importlib.metadata.version` reads."""
    package = target / "molink"
    package.mkdir()
    own = (CHECKOUT / "public" / "__init__.py").read_text(encoding="utf-8")
    start = f"__path__ += [{str(CHECKOUT)!r}, {str(CHECKOUT / 'public')!r}]\n" + own
    (package / "__init__.py").write_text(start, encoding="utf-8")
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    metadata = target / f"molink-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: molink\nVersion: {version}\n", "utf-8")


def environment(
    device: str, prepared: Path, inherited: Mapping[str, str], *, interpret: bool = False
) -> dict[str, str]:
    """Of every process that the suite starts: it finds what was prepared before what is installed."""
    folders = [str(prepared), str(_TESTS), *filter(None, [inherited.get("PYTHONPATH")])]
    fixed = {
        "PYTHONPATH": os.pathsep.join(folders),
        "MOLINK_TEST_DEVICE": device,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if interpret:
        fixed["TRITON_INTERPRET"] = "1"
    return {**inherited, "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"), **fixed}


def missing_modules(names: tuple[str, ...]) -> list[str]:
    """Those of these modules that cannot be found here."""
    from importlib.util import find_spec

    return [name for name in names if find_spec(name) is None]


def device_name(device: str) -> str:
    """The device for people, with the software that drives it."""
    import torch

    python = f"Python {sys.version_info.major}.{sys.version_info.minor}, torch {torch.__version__}"
    if not device.startswith("cuda"):
        return f"a processor, {python}"
    number = int(re.sub(r"\D", "", device) or 0)
    triton = "no Triton"
    if not missing_modules(("triton",)):
        import triton as found

        triton = f"Triton {found.__version__}"
    capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
    memory_gb = torch.cuda.get_device_properties(number).total_memory / 1e9
    name = torch.cuda.get_device_name(number)
    return f"{name} (compute capability {capability}, {memory_gb:.1f} GB), {python}, {triton}"
