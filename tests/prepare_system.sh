#!/bin/sh
# Checks what `make` needs from the system: a tried Python, a C compiler and GMP's headers, for libp2p's dependency
# fastecdsa is compiled on install. Installs the latter two where it is root on Debian or Ubuntu; elsewhere prints the
# command. Takes make's goals as arguments, PYTHON and TRIED (versions, newest first) from the environment.
set -eu

if [ -z "${PYTHON:-}" ] || ! version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
  echo "molink needs Python, one of $TRIED; ${PYTHON:-none of these} was found. Install one, and try: make PYTHON=python${TRIED%% *} $*" >&2
  exit 1
fi
case " $TRIED " in
  *" $version "*) ;;
  *)
    echo "molink needs Python, one of $TRIED; $PYTHON is $version. Try: make PYTHON=python${TRIED%% *} $*" >&2
    exit 1
    ;;
esac

complete() {
  command -v gcc >/dev/null && printf '#include <stdio.h>\n#include <gmp.h>\n' | gcc -E - >/dev/null 2>&1
}
complete && exit 0

needs="gcc and the headers of C and GMP are missing: libp2p's dependency fastecdsa is compiled on install."
if [ "$(uname)" = Darwin ]; then
  command="brew install gmp   # after xcode-select --install"
elif command -v apt-get >/dev/null; then
  command="apt-get update && apt-get install -y gcc libc6-dev libgmp-dev"
  if [ "$(id -u)" = 0 ]; then
    echo "$needs Installing them: $command"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq gcc libc6-dev libgmp-dev; } >/dev/null
    complete && exit 0
  fi
elif command -v dnf >/dev/null; then
  command="dnf install -y gcc glibc-devel gmp-devel"
elif command -v pacman >/dev/null; then
  command="pacman -S --needed gcc gmp"
else
  command="apt-get install -y gcc libc6-dev libgmp-dev (Debian, Ubuntu), dnf install -y gcc glibc-devel gmp-devel (Fedora), pacman -S --needed gcc gmp (Arch), or brew install gmp (Homebrew)"
fi
echo "$needs Run: $command" >&2
exit 1
