"""What can be wrong on a machine, planted one at a time, and how each is fixed."""

from __future__ import annotations

import getpass
import os
import plistlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.protocol.key_file import KeyPlace, add_key

from .daemon import fake, toml_of
from .doctor_ground import FULL, HIDING, LINGERING, MAC, NO_BACK_END, Ground
from .hub_caches import MODEL, REPO, index_of, safetensors, write_folder, write_repository
from .local_hub import COMMIT, LocalHub

Act = Callable[[Ground], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Something that is wrong.

    Attributes:
        name: what it is.
        plant: makes it so on a sound ground.
        subject: of the finding that names it.
        words: stand in that finding.
        level: of that finding.
        edit: does by hand what the finding's fix says.
        edited: stands in the fix, if it is done by hand.
        is_literal: whether `edit` does what the finding says word for word, without judgement.
        runs: commands that stand in the fix, and are run as they are after the edit.
        is_linux_only: whether the doctor says so on Linux alone.
        played: how a played program, which stands for one that cannot run here, is called.

    Without an edit and commands in the fix, the finding's own command is run as it is.
    """

    name: str
    plant: Act
    subject: str
    words: str
    level: str = "problem"
    edit: Act | None = None
    edited: str = ""
    is_literal: bool = False
    runs: tuple[str, ...] = ()
    played: str = ""
    is_linux_only: bool = False

    @property
    def is_printed(self) -> bool:
        """Whether nothing but what is printed fixes it."""
        return self.edit is None or self.is_literal or bool(self.runs)


def sound(ground: Ground) -> None:
    """The configuration as it was."""
    ground.write(ground.model())


def supervisor(**keys: Any) -> Act:
    """The configuration with other keys of `[supervisor]`."""
    return lambda ground: ground.write(ground.model(), supervisor=keys)


def long_runtime_dir(ground: Ground) -> None:
    ground.write(ground.model(), supervisor={"runtime_dir": str(ground.folder / ("x" * 90))})


def open_runtime_folder(ground: Ground) -> None:
    (ground.folder / "run").mkdir(mode=0o755)
    (ground.folder / "run").chmod(0o755)


def started(ground: Ground, **entry: Any) -> int:
    """Starts a daemon with a fake engine; returns its pid."""
    ground.write(fake(**entry))
    done = ground.shell("mlxsup start --detach")
    assert done.returncode == 0, done.stderr
    return int((ground.folder / "run" / "lock").read_text().split()[0])


def killed_daemon(ground: Ground) -> None:
    ground.end(started(ground, preload=False))


def stopped_daemon(ground: Ground) -> None:
    os.kill(started(ground, preload=False), signal.SIGSTOP)


def strange_lock(ground: Ground) -> None:
    ground.write(fake(preload=False))
    other = ground.start_other("sleep", "600")
    (ground.folder / "run").mkdir(mode=0o700)
    (ground.folder / "run" / "lock").write_text(f"{other.pid} {other.pid}@boot+1\n")


def broken_model(ground: Ground) -> None:
    """Its cause is gone when it is started again."""
    started(ground, fake={"load_error": "bad", "load_fault_generations": 1})
    assert ground.shell("mlxsup wait m").returncode == 1


def other_daemon(ground: Ground) -> None:
    other = ground.folder / "other"
    other.mkdir()
    top = {"runtime_dir": str(other / "run"), "log_dir": str(other / "logs")}
    file = other / "other.toml"
    file.write_text(toml_of({"supervisor": top, "models.o": fake(preload=False)}))
    assert ground.shell(f"mlxsup start --detach --config {file}").returncode == 0


def few_files(ground: Ground) -> None:
    ground.prelude = "ulimit -n 64"


def may_raise_limits() -> bool:
    """Whether `prlimit` may do here what its command says."""
    done = subprocess.run(
        ["/bin/sh", "-c", "ulimit -n 64 && prlimit --pid $$ --nofile=65:65"],
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def few_files_of_user(ground: Ground) -> None:
    """A played program cannot raise the limit of its shell, so the next shell has none."""
    raised = ground.folder / "raised"
    ground.prelude = f"test -e {raised} || ulimit -n 64"
    for name in ("prlimit", "launchctl"):
        ground.played_tool(name, f"touch {raised}")


def append(text: str) -> Act:
    """The configuration with something at its end."""

    def plant(ground: Ground) -> None:
        ground.config.write_text(ground.config.read_text() + text)

    return plant


def suggested_key(ground: Ground) -> None:
    """Writes the key that the finding names, in place of the one that it does not know."""
    _, findings = ground.doctor()
    what = next(one["what"] for one in findings if "unknown key" in one["what"])
    found = re.search(r"unknown key models\.m\.(\w+); did you mean (\w+)\?", what)
    assert found, what
    ground.config.write_text(ground.config.read_text().replace(found[1], found[2]))


def no_config(ground: Ground) -> None:
    ground.config.unlink()
    write_folder(ground.folder / ".mlxsup" / "models" / "small")


def named_config(ground: Ground) -> None:
    no_config(ground)
    ground.variables["MLXSUP_CONFIG"] = str(ground.folder / "none.toml")


def shadow(ground: Ground) -> None:
    folder = ground.folder / ".mlxsup"
    folder.mkdir(mode=0o700)
    (folder / "config.toml").write_text(ground.config.read_text())


def unshadowed(ground: Ground) -> None:
    (ground.folder / ".mlxsup" / "config.toml").unlink()


def no_model(ground: Ground) -> None:
    (ground.folder / "model").rename(ground.folder / "elsewhere")


def model_back(ground: Ground) -> None:
    (ground.folder / "elsewhere").rename(ground.folder / "model")


def cut_weights(ground: Ground) -> None:
    weights = ground.folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def whole_weights(ground: Ground) -> None:
    write_folder(ground.folder / "model")


def pointer(ground: Ground) -> None:
    weights = ground.folder / "model" / "model.safetensors"
    weights.rename(ground.folder / "real")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    # `git -C FOLDER lfs pull`
    ground.tool(
        "git", f'test "$3 $4" = "lfs pull" && cp {ground.folder}/real "$2"/model.safetensors'
    )


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARDED = {name: content for name, content in MODEL.items() if name != "model.safetensors"} | {
    "model.safetensors.index.json": index_of(*SHARDS),
    SHARDS[0]: safetensors({"a0": 8}),
    SHARDS[1]: safetensors({"a1": 8}),
}


def serve_shards(ground: Ground, hub: LocalHub) -> None:
    """The hub has the model in two shards, and the commands of the ground ask that hub."""
    hub.add(REPO, SHARDED)
    ground.variables["HF_ENDPOINT"] = hub.endpoint


def missing_shard(ground: Ground) -> None:
    had = {name: content for name, content in SHARDED.items() if name != SHARDS[1]}
    path = write_repository(ground.folder / "hf" / "hub", files=had, commit=COMMIT)
    ground.write({"path": str(path)})


def forbidden_download(ground: Ground) -> None:
    ground.write({"repo": REPO})
    ground.variables["HF_HUB_OFFLINE"] = "1"


def later_download(ground: Ground) -> None:
    ground.write({"repo": REPO})


def open_token(ground: Ground) -> None:
    token = ground.folder / "hf" / "token"
    token.parent.mkdir()
    token.write_text("hf_SECRET")
    token.chmod(0o644)


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def gateway(ground: Ground, listen: str) -> None:
    ground.write(ground.model(), gateway={"listen": listen})


def taken_port(ground: Ground) -> None:
    gateway(ground, f"127.0.0.1:{ground.taken_port()}")


def free_listen(ground: Ground) -> None:
    """Sets what the fix says, word for word."""
    _, findings = ground.doctor()
    fix = next(one["fix"] for one in findings if one["subject"] == "gateway")
    found = re.search(r'set (listen = "[^"]+") in \[gateway\]', fix)
    assert found, fix
    text = ground.config.read_text()
    ground.config.write_text(re.sub(r'listen = "[^"]+"', found.group(1), text))


def exposed(ground: Ground) -> None:
    gateway(ground, f"0.0.0.0:{free_port()}")


def open_keys(ground: Ground) -> None:
    place = KeyPlace.beside(ground.config, ground.folder / "run")
    add_key(place, name="a", account="a", is_operator=False, created="now")
    place.file.chmod(0o644)
    gateway(ground, f"127.0.0.1:{free_port()}")


def no_extra(ground: Ground) -> None:
    ground.fake_pip()
    (ground.planted / "sitecustomize.py").write_text(HIDING)
    gateway(ground, f"127.0.0.1:{free_port()}")


def old_mlx(ground: Ground) -> None:
    ground.fake_pip()
    facts = ground.planted / "mlx-0.31.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx\nVersion: 0.31.0\n")


def full_disk(ground: Ground) -> None:
    (ground.planted / "sitecustomize.py").write_text(FULL)


def emptied_disk(ground: Ground) -> None:
    (ground.planted / "sitecustomize.py").unlink()


def file_as_log_dir(ground: Ground) -> None:
    (ground.folder / "file").touch()
    ground.write(ground.model(), supervisor={"log_dir": str(ground.folder / "file" / "logs")})


def file_as_runtime_dir(ground: Ground) -> None:
    (ground.folder / "run").touch()


def too_large(ground: Ground) -> None:
    ground.write(fake(memory="2GiB"), supervisor={"memory_budget": "1GiB"})


def wrong_clock(ground: Ground) -> None:
    later = time.time() + 10 * 86400
    os.utime(ground.config, (later, later))
    for name in ("timedatectl", "systemsetup"):
        ground.tool(name, f"touch {ground.config}")  # stands for a clock that is set


def other_endpoint(ground: Ground) -> None:
    ground.prelude = "export MLXSUP_ENDPOINT=ipc:///tmp/mlxsup-nowhere/client.sock"


def service(ground: Ground, program: str, config: Path) -> None:
    """The file of a service, for the manager of this system."""
    words = [program, "start", "--config", str(config)]
    if sys.platform == "darwin":
        path = ground.folder / "Library" / "LaunchAgents" / "mlxsup.plist"
        text = plistlib.dumps({"ProgramArguments": words, "ProcessType": "Interactive"}).decode()
    else:
        path = ground.folder / ".config" / "systemd" / "user" / "mlxsup.service"
        text = f"[Service]\nExecStart={' '.join(words)}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def lost_program(ground: Ground) -> None:
    service(ground, "/nowhere/mlxsup", ground.config)


def lost_config(ground: Ground) -> None:
    service(ground, str(ground.folder / "tools" / "mlxsup"), ground.folder / "none.toml")


def lost_login(ground: Ground) -> None:
    """Its user may not stay after the logout; systemd notes who may in a folder of the machine."""
    lingering = ground.folder / "linger"
    lingering.mkdir()
    name = getpass.getuser()
    ground.variables["LOGNAME"] = name
    (ground.planted / "sitecustomize.py").write_text(LINGERING.format(folder=str(lingering)))
    service(ground, str(ground.folder / "tools" / "mlxsup"), ground.config)
    ground.played_tool("loginctl", f"touch {lingering / name}")


def sleeping_mac(ground: Ground) -> None:
    (ground.planted / "sitecustomize.py").write_text(MAC)
    set_to = ground.folder / "sleep"
    set_to.write_text("10")
    ground.played_tool(
        "pmset",
        f'test "$1" = -g && echo " sleep $(cat {set_to})" || echo "$4" > {set_to}',
    )


def no_back_end(ground: Ground) -> None:
    ground.fake_pip()
    (ground.planted / "sitecustomize.py").write_text(NO_BACK_END)


def found_program(ground: Ground) -> None:
    """What a shell says: the path of the program, and the file that commands read."""
    program = ground.shell("command -v mlxsup").stdout.strip()
    service(ground, program, ground.config)
