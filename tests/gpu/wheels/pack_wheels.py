"""Makes the wheels of a folder small: `pack_wheels.py DIR`, after pip has filled it. Standard library only.

A wheel compresses each of its files alone. Here its files are stored as they are and the wheel is compressed whole,
which halves it: NAME.whl.xz, from which `xz -d` makes a wheel again.
"""

import argparse
import io
import lzma
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_BYTES = 45_000_000
_LIBRARY = "libbitsandbytes_"


def pack(wheel: Path, keep: Callable[[str], bool]) -> Path:
    """Replaces the wheel by its packed form, with the files whose names are kept."""
    stored = io.BytesIO()
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as target:
        for member in archive.infolist():
            if not member.is_dir() and keep(member.filename):
                target.writestr(member.filename, archive.read(member))
    packed = wheel.with_name(f"{wheel.name}.xz")
    packed.write_bytes(lzma.compress(stored.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    wheel.unlink()
    return packed


def kept_for(cuda: str) -> Callable[[str], bool]:
    """Of bitsandbytes' libraries, one for each version of each maker's cards, this version's and the processor's."""
    wanted = (f"{_LIBRARY}cuda{cuda}.", f"{_LIBRARY}cpu.")
    return lambda name: _LIBRARY not in name or any(part in name for part in wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", default="130", help="bitsandbytes' name of the card's CUDA version")
    options = parser.parse_args(arguments)
    keep = kept_for(options.cuda)
    for wheel in sorted(options.folder.glob("*.whl")):
        pack(wheel, keep)
    packed = sorted(options.folder.glob("*.whl.xz"))
    size = sum(path.stat().st_size for path in packed)
    print(f"{len(packed)} wheels, {size / 1e6:.1f} MB in {options.folder}")
    if size > MOST_BYTES:
        print(f"at most {MOST_BYTES / 1e6:.0f} MB may travel: drop what no case needs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
