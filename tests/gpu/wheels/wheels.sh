#!/usr/bin/env bash
# Fetches what `python -m tests.gpu --wheels DIR` needs on a Linux machine with x86-64, a GPU and no network.
#
#   tests/gpu/wheels/wheels.sh DIR
#
# PYTHON: an interpreter of the version that the machine has, 3.12 (python3.12); CUDA: the machine's, for bitsandbytes
# (130). Three packages have no wheels and are built here, fastecdsa with gcc and gmp.h.
set -euo pipefail
folder=${1:?usage: tests/gpu/wheels/wheels.sh DIR}
python=${PYTHON:-python3.12}
cuda=${CUDA:-130}
here=$(cd "$(dirname "$0")" && pwd)
constraints=$here/../../../constraints.txt

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
  { echo "$python does not run: name the machine's version of Python, such as PYTHON=python3.12" >&2; exit 2; }
echo '#include <gmp.h>' | gcc -E - >/dev/null 2>&1 ||
  { echo "gmp.h or gcc is missing, to build fastecdsa. Try: apt-get install -y gcc libc6-dev libgmp-dev" >&2; exit 2; }
mkdir -p "$folder"
rm -f "$folder"/*.whl "$folder"/*.whl.xz
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"$python" -m venv "$venv"
# The constraints name exact versions, and every package is in the list: nothing is resolved.
echo "Fetching and building for Python $version"
"$venv/bin/python" -m pip wheel -q --disable-pip-version-check --no-deps -w "$folder" -c "$constraints" -r "$here/wheels.txt"
"$venv/bin/python" -m pip download -q --disable-pip-version-check --no-deps -d "$folder" -c "$constraints" bitsandbytes
"$venv/bin/python" "$here/pack_wheels.py" "$folder" --cuda "$cuda"
