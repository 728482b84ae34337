# Shared by quickstart.sh and test.sh: finds Python, makes the virtual environment, installs swiftlite.
# Source it from the repository's root.

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; install it, then run this again"
}

# A machine without a GPU should get PyTorch's small CPU build where one can be had. pip prefers a `+cpu` build of the
# same version as soon as any index it knows offers one; PyTorch's own index is added only if it answers.
cpu_index() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && return
    "$1" - <<'PY'
import urllib.request
index = "https://download.pytorch.org/whl/cpu"
try:
    urllib.request.urlopen(index + "/torch/", timeout=4).close()
    print("--extra-index-url", index)
except OSError:
    pass
PY
}

# install VENV EXTRA: create the environment if it is not there, and install this checkout into it.
install() {
    local venv=$1 extra=$2 python
    python=$(find_python)
    if [ ! -x "$venv/bin/python" ]; then
        "$python" -m venv "$venv" || fail "no virtual environment could be made in $venv (on Debian: apt install python3-venv)"
    fi
    # shellcheck disable=SC2046
    "$venv/bin/python" -m pip install --disable-pip-version-check $(cpu_index "$venv/bin/python") -e ".[$extra]" ||
        fail "pip could not install swiftlite; see its message above"
}
