#!/bin/sh
# Checks that python3 >= 3.11 with venv and git are here, says what to install if not, and hands over to
# bootstrap.py, which fills .venv. POSIX sh, because Python may be what is missing.
set -eu
cd "$(dirname "$0")/.."

missing() {
    printf 'warpspec: %s\n  Debian, Ubuntu: %s\n' "$1" "$2" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# PYTHON chooses an interpreter; an existing .venv decides for itself; otherwise python3, then newer named ones.
for candidate in ${PYTHON:-} .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "${python:-}" ]; then
    found=$(python3 --version 2>/dev/null || echo 'no python3')
    missing "needs Python 3.11 or later, found $found" "sudo apt-get install python3 python3-venv (Debian 12+, Ubuntu 24.04+; or set PYTHON=/path/to/python3)"
fi
if [ ! -x .venv/bin/python ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    missing "$python cannot make virtual environments (no venv or ensurepip module)" \
        "sudo apt-get install python3-venv (or python$version-venv)"
fi
command -v git >/dev/null 2>&1 || missing "git is missing" "sudo apt-get install git"

exec "$python" scripts/bootstrap.py "$@"
