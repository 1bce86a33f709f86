"""Builds a release and tries it: `python packaging/release.py`, which `make release` runs.

1. `dist/` gets the sdist and the wheel of mlxsup and mlxsup-client, the wheels out of the sdists.
2. Each wheel is installed as users install it (pip for every Python that is there, `uv tool`, pipx)
   into environments of their own, far from the checkout, and asked for an answer.
3. packaging/homebrew/mlxsup.rb gets the version, the addresses and the wheels that it installs.
4. `dist/SHA256SUMS` gets the checksums.

It needs `uv`, which finds Pythons and resolves for other machines, and a package registry. The
addresses are in pyproject.toml, under [project.urls].
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DIST = ROOT / "dist"
FORMULA = ROOT / "packaging" / "homebrew" / "mlxsup.rb"
SOURCE_URL = "https://files.pythonhosted.org/packages/source/m/mlxsup"

PYTHONS = ("3.11", "3.12", "3.13")
BREW_PYTHON = (3, 13)
BREW_MACOS = (14, 0)
"""What the formula depends on: MLX has no wheels for an older macOS."""

EXTRA = "" if sys.platform == "darwin" else "[cpu]"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def run(*words: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Return what a command prints; it sees nothing of the checkout.

    Raises:
        SystemExit: it failed.
    """
    unwanted = ("PYTHON", "MLXSUP", "VIRTUAL_ENV")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(unwanted)}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd, env=kept | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---------------------------------------------------------------- 1: build


def build() -> None:
    """Fill `dist/`, from a copy: what earlier builds have left must not get into a wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="mlxsup-build-") as place:
        files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        for name in filter(None, files.split("\0")):
            target = Path(place) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists():
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        for folder in (Path(place), Path(place) / "packaging" / "client"):
            run("uv", "build", "--quiet", "--out-dir", DIST, folder)
    (DIST / ".gitignore").unlink(missing_ok=True)


def built(pattern: str) -> Path:
    """Return the file of `dist/` that is called so."""
    [found] = DIST.glob(pattern)
    return found


# ---------------------------------------------------------------- 2: try


def is_there(python: str) -> bool:
    """Return whether this machine has a Python, and say so if it has not."""
    find = ("uv", "python", "find", "--quiet", "--no-python-downloads", python)
    if subprocess.run(find, capture_output=True, check=False).returncode == 0:
        return True
    print(f"pip, Python {python}: not tried, because this machine has no Python {python}")
    return False


def by_pip(python: str) -> Callable[[Path], Path]:
    """Return what installs the wheel with pip into an environment of this Python."""

    def install(place: Path) -> Path:
        run("uv", "venv", "--quiet", "--seed", "--python", python, place / "env", cwd=place)
        pip = place / "env" / "bin" / "pip"
        run(pip, "install", "--quiet", f"{built('mlxsup-*.whl')}{EXTRA}", cwd=place)
        return place / "env" / "bin"

    return install


def by_uv(place: Path) -> Path:
    """Install the wheel as a tool of uv."""
    folders = {"UV_TOOL_DIR": f"{place}/tools", "UV_TOOL_BIN_DIR": f"{place}/bin"}
    wheel = f"{built('mlxsup-*.whl')}{EXTRA}"
    run("uv", "tool", "install", "--quiet", wheel, cwd=place, **folders)
    return place / "bin"


def by_pipx(place: Path) -> Path:
    """Install the wheel with pipx."""
    folders = {"PIPX_HOME": f"{place}/pipx", "PIPX_BIN_DIR": f"{place}/bin"}
    wheel = f"{built('mlxsup-*.whl')}{EXTRA}"
    run("uvx", "--quiet", "pipx", "install", wheel, cwd=place, **folders)
    return place / "bin"


@contextmanager
def new_place() -> Iterator[Path]:
    """Give an empty folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-r-", dir="/tmp") as place:
        yield Path(place)


def check_installation(install: Callable[[Path], Path], model: Path) -> str:
    """Install mlxsup, and use it as its user does: schema, page, a real answer, both clients.

    Returns:
        How long the installation took, and how large it is.
    """
    with new_place() as place:
        begin = time.monotonic()
        commands = install(place)
        took = time.monotonic() - begin
        home = {"HOME": str(place / "home"), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
        (place / "home").mkdir()
        mlxsup = commands / "mlxsup"

        def said(*words: str | Path) -> str:
            return run(mlxsup, *words, cwd=place, **home)

        assert said("--version").startswith("mlxsup "), "no version"
        assert '"$schema"' in said("config", "schema"), "no schema"
        try:
            http = ("--http", "127.0.0.1:0")
            said("start", "--detach", *http, "--model", f"m={model}")
            assert ANSWER in said("generate", "m", QUESTION, "--max-tokens", "20"), "no answer"
            url = re.findall(r'"url": ?"(http://[^"]+)"', said("status", "--json"))[0]
            asked = urllib.request.Request(f"{url}/", headers={"Accept": "text/html"})
            with urllib.request.urlopen(asked, timeout=60) as page:
                text = page.read().decode()
            assert "<html" in text, "no page"
            for name in re.findall(r'(?:src|href)="(/?[\w./-]+\.(?:js|css))"', text):
                with urllib.request.urlopen(f"{url}/{name.lstrip('/')}", timeout=60) as file:
                    assert file.read(), f"{name} is empty"
            check_client(place, home)
        finally:
            said("stop", "--now")
        size = run("du", "-sm", place, cwd=place).split()[0]
        return f"{took:.0f} s, {size} MB"


def check_client(place: Path, home: dict[str, str]) -> None:
    """Ask the running daemon with mlxsup-client, from an environment of its own."""
    environment = place / "client"
    run("uv", "venv", "--quiet", environment, cwd=place)
    python = environment / "bin" / "python"
    wheel = built("mlxsup_client-*.whl")
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=place)
    code = (
        "from mlxsup import Client\n"
        f"with Client() as client: print(client.complete('m', messages=[{{'role': 'user',"
        f" 'content': {QUESTION!r}}}], max_tokens=20).text)"
    )
    assert ANSWER in run(python, "-c", code, cwd=place, **home), "no answer to the client"


# ---------------------------------------------------------------- 3: the formula


def formula(sdist: Path) -> str:
    """Return the formula for a sdist, with every wheel that a Mac needs for it."""
    text = FORMULA.read_text()
    head = {
        "homepage": PROJECT["project"]["urls"]["Homepage"],
        "url": f"{SOURCE_URL}/{sdist.name}",
        "sha256": digest_of(sdist),
    }
    for word, value in head.items():
        text = re.sub(rf'^  {word} ".*"$', f'  {word} "{value}"', text, count=1, flags=re.MULTILINE)
    blocks = "".join(
        f'  resource "{name}" do\n    url "{url}"\n    sha256 "{digest}"\n  end\n\n'
        for name, url, digest in resources()
    )
    pattern = r'(?:^  resource ".*" do\n.*\n.*\n  end\n\n)*(?=^  def install$)'
    return re.sub(pattern, lambda _: blocks, text, count=1, flags=re.MULTILINE)


def resources() -> list[tuple[str, str, str]]:
    """Return name, URL and SHA-256 of the wheels that mlxsup and its build need on a Mac."""
    version = ".".join(map(str, BREW_PYTHON))
    with tempfile.TemporaryDirectory() as place:
        wanted = Path(place) / "wanted.in"
        needs = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
        wanted.write_text("\n".join(needs))
        lock = Path(place) / "pylock.toml"
        run(
            "uv", "pip", "compile", "--quiet", "--format", "pylock.toml", "--no-config",
            "--python-version", version, "--python-platform", "aarch64-apple-darwin",
            "--output-file", lock, wanted,
            MACOSX_DEPLOYMENT_TARGET=".".join(map(str, BREW_MACOS)),
        )  # fmt: skip
        packages = tomllib.loads(lock.read_text())["packages"]
    platforms = list(mac_platforms(BREW_MACOS, "arm64"))
    tags = [*cpython_tags(BREW_PYTHON, platforms=platforms)]
    tags += compatible_tags(BREW_PYTHON, platforms=platforms)
    return [(one["name"], *_best_wheel(one, tags)) for one in packages]


def _best_wheel(package: dict[str, Any], tags: Sequence[Tag]) -> tuple[str, str]:
    """Return URL and SHA-256 of the wheel with the most specific tag."""
    rank = {tag: place for place, tag in enumerate(tags)}
    found = []
    for wheel in package.get("wheels", ()):
        *_, own = parse_wheel_filename(wheel["url"].rpartition("/")[2])
        places = [rank[tag] for tag in own if tag in rank]
        found += [(min(places), wheel["url"], wheel["hashes"]["sha256"])] if places else []
    if not found:
        raise SystemExit(f"{package['name']} has no wheel for the formula")
    return min(found)[1:]


# ---------------------------------------------------------------- 4: checksums


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_checksums() -> None:
    """Write what `sha256sum --check` reads."""
    files = sorted(path for path in DIST.iterdir() if path.suffix in (".gz", ".whl"))
    (DIST / "SHA256SUMS").write_text("".join(f"{digest_of(one)}  {one.name}\n" for one in files))


def main() -> None:
    """Do all, or what the options leave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2")
    parser.add_argument("--only", choices=["build", "try", "formula"])
    only = parser.parse_args()
    if shutil.which("uv") is None:
        raise SystemExit("uv is needed: pip install uv")
    if only.only in (None, "build"):
        build()
        run("uvx", "--quiet", "twine", "check", "--strict", *DIST.glob("mlxsup*"))
        write_checksums()
        print(*sorted(path.name for path in DIST.iterdir()), sep="\n")
    if only.only in (None, "try"):
        ways = {"uv tool": by_uv, "pipx": by_pipx}
        ways |= {f"pip, Python {python}": by_pip(python) for python in PYTHONS if is_there(python)}
        for name, way in ways.items():
            print(f"{name}: {check_installation(way, only.model.resolve())}", flush=True)
    if only.only in (None, "formula"):
        FORMULA.write_text(formula(built("mlxsup-*.tar.gz")))
        print(f"wrote {FORMULA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
