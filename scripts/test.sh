#!/usr/bin/env bash
# Makes a virtual environment, installs swiftlite with its test extras and runs the whole suite.
# Files run side by side, one a core and four at most, each with what its tests share, in the order of tests/conftest.py.
# usage: scripts/test.sh [--venv DIR] [pytest arguments]
set -euo pipefail
venv=.venv
if [ "${1:-}" = --venv ]; then
    venv=${2:?--venv needs a folder}
    [[ $venv == /* ]] || venv=$PWD/$venv
    shift 2
fi
cd "$(dirname "$0")/.."
source scripts/common.sh

say "1/2 installing swiftlite and its test tools into $venv"
install "$venv" test
say "2/2 running the tests"
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
