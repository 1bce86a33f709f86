#!/bin/sh
# Plants small bugs with mutmut and prints those that no unit test notices:
#   tools/mutants.sh [PACKAGE…]     every package without one; TESTS=files, JOBS=processes
# Works on a copy in build/mutants/PACKAGE, where mlxsup is one folder of real files. There,
# `mutmut show NAME` prints one of the bugs.
set -eu
cd "$(dirname "$0")/.."
packages=${*:-protocol store supervisor worker client gateway downloader cli}
tests=${TESTS:-tests/unit}
jobs=${JOBS:-2}
python=$PWD/.venv/bin/python

[ -x .venv/bin/mutmut ] ||
    "$python" -m pip install --quiet --disable-pip-version-check 'mutmut>=3.8,<4'
for package in $packages; do
    place=build/mutants/$package
    rm -rf "$place"
    mkdir -p "$place"
    cp -RL typings/mlxsup "$place/mlxsup"
    cp -RL tests tools docs config.example.toml README.md packaging "$place"
    for folder in "$place"/mlxsup/*/; do  # some tests read the source next to tests/
        mkdir -p "$place/mutants"
        ln -s "mlxsup/$(basename "$folder")" "$place/mutants/$(basename "$folder")"
    done
    "$python" - "$package" "$tests" >"$place/pyproject.toml" <<'END'
import json, sys, tomllib

package, tests = sys.argv[1:]
pytest = tomllib.load(open("pyproject.toml", "rb"))["tool"]["pytest"]["ini_options"]
tables = {
    "tool.mutmut": {
        "source_paths": ["mlxsup"],
        "only_mutate": [f"mlxsup/{package}/*"],
        "also_copy": ["tests", "tools", "docs", "config.example.toml", "README.md", "packaging"],
        "pytest_add_cli_args": ["-m", "not slow", "-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": tests.split(),
    },
    "tool.pytest.ini_options": pytest,
}
for name, values in tables.items():
    print(f"[{name}]")
    for key, value in values.items():
        print(f"{key} = {json.dumps(value)}")
END
    (cd "$place" && "$python" -m mutmut run --max-children "$jobs" >run.log 2>&1) || {
        tail -40 "$place/run.log"
        exit 1
    }
    echo "$package: bugs that no test notices"
    (cd "$place" && "$python" -m mutmut results) | grep -E ': (survived|no tests|suspicious)' || true
done
