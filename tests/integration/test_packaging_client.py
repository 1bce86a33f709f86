"""mlxsup-client, the client without MLX: what is in it, and that it works next to a daemon.

The daemon runs in another environment; the client has pyzmq, msgpack and psutil from a registry.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from support.cli.installed_daemon import daemon_of
from support.cli.typed_user import check_types
from support.environments import Environment, need_registry, run
from support.wheels import Built, names_in

pytestmark = pytest.mark.timeout(1200)

PARTS = ("client", "protocol")
SHARED = ("mlxsup/__init__.py", "mlxsup/py.typed", *(f"mlxsup/{part}/" for part in PARTS))

PROGRAM = """\
import sys
from mlxsup import Client

with Client() as client:
    for delta in client.generate("m", prompt="[[say hello from another environment]]"):
        print(delta.text, end="", flush=True)
print()
print(sorted(name for name in sys.modules if name.startswith(("mlx.", "mlx_lm", "pydantic"))))
"""


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of the package in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in names_in(wheel) if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def of_client(built_client: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A clean environment with mlxsup-client and what it requires, and nothing lent."""
    environment = Environment.make(tmp_path_factory.mktemp("client") / "env")
    done = environment.pip("install", "--quiet", built_client.wheel)
    need_registry(done, "pyzmq, msgpack and psutil")
    return environment


# ---------------------------------------------------------------- what is in it


def test_it_holds_the_shared_files_of_mlxsup_and_no_others(
    built: Built, built_client: Built
) -> None:
    shared = {n: text for n, text in contents(built.wheel).items() if n.startswith(SHARED)}
    own = contents(built_client.wheel)
    assert own == shared
    assert {f"mlxsup/{part}/py.typed" for part in PARTS} < set(own)


def test_its_sdist_alone_gives_the_same_wheel(built_client: Built) -> None:
    assert contents(built_client.wheel_of_sdist) == contents(built_client.wheel)


def test_it_has_a_licence_and_no_command(built_client: Built) -> None:
    with zipfile.ZipFile(built_client.wheel) as archive:
        texts = {Path(n).name: archive.read(n).decode() for n in archive.namelist() if "-info" in n}
    assert texts["LICENSE"] == (built_client.source / "LICENSE").read_text()
    assert "entry_points.txt" not in texts
    assert [
        line for line in texts["METADATA"].splitlines() if line.startswith("Requires-Dist")
    ] == [
        "Requires-Dist: pyzmq>=26",
        "Requires-Dist: msgpack>=1.1.0",
        "Requires-Dist: psutil>=5.9",
    ]


# ---------------------------------------------------------------- that it works


def test_it_streams_from_a_daemon_of_another_environment(
    of_client: Environment, installed: Environment
) -> None:
    packages = {path.name.partition("-")[0] for path in of_client.site_packages.glob("*.dist-info")}
    assert packages == {"mlxsup_client", "pyzmq", "msgpack", "psutil"}
    program = of_client.elsewhere / "program.py"
    program.write_text(PROGRAM)
    with daemon_of(installed) as config:
        done = run(of_client.python, program, cwd=of_client.elsewhere, MLXSUP_CONFIG=str(config))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["hello from another environment", "[]"]


def test_the_asynchronous_client_is_there_too(of_client: Environment) -> None:
    said = of_client.evaluates("from mlxsup import AsyncClient; print(AsyncClient.__module__)")
    assert said == "mlxsup.client.async_client"


def test_type_checkers_find_its_types(of_client: Environment) -> None:
    check_types(of_client)


# ---------------------------------------------------------------- next to mlxsup


def test_removing_it_breaks_mlxsup_in_words_and_installing_that_again_helps(
    built: Built, built_client: Built, tmp_path: Path
) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.lend_libraries()
    how = ("--quiet", "--no-deps", "--no-index")
    environment.pip_well("install", *how, built.wheel, built_client.wheel)
    version = environment.says("mlxsup", "--version")
    assert version.startswith("mlxsup "), "the same files, whichever was installed last"

    environment.pip_well("uninstall", "--quiet", "--yes", "mlxsup-client")
    broken = run(environment.folder / "bin" / "mlxsup", "--version", cwd=environment.elsewhere)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert broken.stderr == (
        "mlxsup: parts of the installed package are missing (mlxsup.protocol)\n"
        "hint: install mlxsup again; mlxsup-client shares files with it, so keep only one of the"
        " two\n"
    )
    environment.pip_well("install", *how, "--force-reinstall", built.wheel)
    assert environment.says("mlxsup", "--version") == version
