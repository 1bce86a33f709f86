#!/bin/sh
# Creates .venv with mlxsup and its development tools; does nothing where that is already so.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "mlxsup setup: $1" >&2
    exit 1
}

stamp=.venv/.mlxsup-installed
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && [ ! tools/setup.sh -nt "$stamp" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

is_new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c "$is_new_enough" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || fail "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python make setup"
"$python" -c "$is_new_enough" 2>/dev/null \
    || fail "$python is older than Python 3.11; name a newer one with PYTHON=/path/to/python make setup"

if [ ! -x .venv/bin/python ]; then
    echo "creating .venv with $("$python" --version)"
    "$python" -m venv .venv \
        || fail "the virtual environment could not be made; on Debian install python3-venv"
fi
echo "installing mlxsup and its tools (some hundred MB the first time)"
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev]' \
    2>.venv/pip.log; then
    cat .venv/pip.log >&2
    fail "pip could not install what is needed; is the package registry reachable?"
fi
# Real chat templates, for the tests; the package's own dependencies are not needed.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade \
    --target .venv/share/chat-templates trl==1.16.0 2>.venv/pip.log || {
    cat .venv/pip.log >&2
    fail "pip could not download the chat templates that the tests need"
}
touch "$stamp"
