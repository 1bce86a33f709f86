"""packaging/homebrew: its service starts what the command line has, as the job of launchd does."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import click
import pytest
from packaging.requirements import Requirement

from mlxsup.cli.main import root
from mlxsup.cli.service import plist
from mlxsup.protocol.version import VERSION

from support.cli.service_facts import mac_facts
from support.wheels import PROJECT

FORMULA = Path(__file__).parents[2] / "packaging" / "homebrew" / "mlxsup.rb"
TEXT = FORMULA.read_text()


def test_the_service_is_the_job_that_service_install_writes() -> None:
    [run] = re.findall(r"^    run \[opt_bin/(.*)\]$", TEXT, re.MULTILINE)
    words = re.findall(r'"([^"]*)"', run)
    job = plist(mac_facts())
    assert words[1:] == job["ProgramArguments"][1:3]
    assert words[0] == Path(job["ProgramArguments"][0]).name
    assert re.findall(r"^    keep_alive (.*)$", TEXT, re.MULTILINE) == ["successful_exit: false"]
    [kind] = re.findall(r"^    process_type :(.*)$", TEXT, re.MULTILINE)
    assert kind == job["ProcessType"].lower()
    outputs = re.findall(r"^    (?:error_)?log_path (.*)$", TEXT, re.MULTILINE)
    assert (len(outputs), len(set(outputs))) == (2, 1), "what it prints, and its errors"


def test_the_commands_that_it_runs_exist() -> None:
    context = click.Context(root)
    start, completion = (root.get_command(context, name) for name in ("start", "completion"))
    assert start is not None
    assert completion is not None
    assert "--service" in {word for parameter in start.params for word in parameter.opts}
    [shells] = re.findall(r"shells: \[(.*)\]", TEXT)
    [choice] = [one.type for one in completion.params if isinstance(one.type, click.Choice)]
    assert set(shells.replace(":", "").split(", ")) <= set(choice.choices)


def test_it_is_of_this_version_and_has_every_requirement_as_a_wheel() -> None:
    assert f"mlxsup-{VERSION}.tar.gz" in TEXT
    found = dict(
        re.findall(r'^  resource "(.*)" do\n    url "(.*)"\n    sha256 "\w{64}"$', TEXT, re.M)
    )
    assert all(url.startswith("https://") and url.endswith(".whl") for url in found.values())
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    assert {Requirement(line).name for line in lines} <= set(found), "make release"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """packaging/release.py, which the library of that name hides."""
    spec = importlib.util.spec_from_file_location("release", FORMULA.parents[1] / "release.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.mark.parametrize(
    ("tags", "best"),
    [
        (["py3-none-any", "cp313-cp313-macosx_13_0_arm64", "cp313-cp313-macosx_14_0_arm64"], 2),
        (["cp313-cp313-macosx_15_0_arm64", "cp313-cp313-macosx_11_0_arm64", "py3-none-any"], 1),
        (["cp312-cp312-macosx_14_0_arm64", "cp313-cp313-macosx_14_0_x86_64", "py3-none-any"], 2),
        (["cp313-cp313-manylinux_2_28_aarch64"], None),
    ],
)
def test_a_mac_gets_the_wheel_that_is_most_its_own(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tags: list[str], best: int | None
) -> None:
    urls = [f"https://h.example/p-1.0-{tag}.whl" for tag in tags]
    wheels = "".join(f'{{url = "{one}", hashes = {{sha256 = "of {one}"}}}},' for one in urls)

    def resolve(*words: str | Path, **_: object) -> None:
        lock = Path(words[words.index("--output-file") + 1])
        lock.write_text(f'[[packages]]\nname = "p"\nwheels = [{wheels}]\n')

    monkeypatch.setattr(release, "run", resolve)
    if best is None:
        with pytest.raises(SystemExit, match="p has no wheel"):
            release.resources()
    else:
        assert release.resources() == [("p", urls[best], f"of {urls[best]}")]


def test_it_keeps_the_rules_of_brew_audit() -> None:
    """Those that can be read: what is described how, and the order of the parts."""
    [text] = re.findall(r'^  desc "(.*)"$', TEXT, re.MULTILINE)
    assert len(text) <= 80
    assert not re.match(r"(?i)(an?|the|mlxsup)\b", text)
    assert text[0].isupper()
    assert text[-1] != "."
    words = ("desc", "homepage", "url", "sha256", "license", "depends_on", "resource",
             "def install", "def caveats", "service do", "test do")  # fmt: skip
    places = [re.search(rf"^  {word}\b", TEXT, re.MULTILINE) for word in words]
    starts = [place.start() for place in places if place is not None]
    assert len(starts) == len(words)
    assert starts == sorted(starts)
    names = re.findall(r'^  resource "(.*)" do$', TEXT, re.MULTILINE)
    assert names == sorted(names)


@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs ruby")
def test_ruby_can_read_it() -> None:
    done = subprocess.run(["ruby", "-c", str(FORMULA)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_file_of_a_release_has_a_checksum(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(release, "DIST", tmp_path)
    for name in ("m-1.whl", "m-1.tar.gz", ".gitignore"):
        (tmp_path / name).write_text(name)
    release.write_checksums()
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert [line.split() for line in lines] == [
        [hashlib.sha256(name.encode()).hexdigest(), name] for name in ("m-1.tar.gz", "m-1.whl")
    ]
