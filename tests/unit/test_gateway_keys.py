"""Keys of the gateway: missing, wrong, new, revoked, damaged files, and the accounts of keys."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxsup.client import AsyncClient
from mlxsup.gateway import keys as keys_module
from mlxsup.gateway.app import Gateway
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.keys import Caller, Keys
from mlxsup.gateway.responses.kept import KeptResponse
from mlxsup.gateway.server import Server
from mlxsup.protocol.gateway import BEAT, BEAT_S, BEAT_WITH_KEYS, GatewayRules
from mlxsup.protocol.key_file import (
    KeyFileError,
    KeyPlace,
    add_key,
    digest_of,
    read_key_file,
    read_keys,
    revoke_key,
    turn_off,
)

from support.eventually import TIMEOUT_S, eventually
from support.gateway.key_place import new_key, place_in
from support.gateway.played_gateway import (
    BODY,
    CHAT,
    PlayedDaemon,
    Response,
    Site,
    said,
)

ANSWER = said("a")


@pytest.fixture
def place(tmp_path: Path) -> KeyPlace:
    return place_in(tmp_path)


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def ask(
    site: Site, path: str = "/v1/models", method: str = "GET", body: Any = None, **headers: str
) -> Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(site.ask(method, path, body, headers=given))


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("authorization", "Bearer sk-mlxsup-x", "invalid_api_key"),
        ("x_api_key", "sk-mlxsup-x", "invalid_api_key"),
        ("x_api_key", "{digest}", "invalid_api_key"),
        ("authorization", "Bearer \xff\xfe", "invalid_api_key"),
        ("authorization", "Bearer " + "x" * 60_000, "invalid_api_key"),
        *(("authorization", value, "missing_api_key")
          for value in ("", "Bearer", "Bearer ", "Basic {key}", "{key}", "Bearer: {key}")),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_wrong_key_is_refused(place: KeyPlace, header: str, value: str, code: str) -> None:
    key = new_key(place, "a")
    digest = place.file.read_text().split('"digest": "')[1].split('"')[0]
    sent = value.format(key=key, digest=digest)
    response = ask(Site(PlayedDaemon(), keys=Keys(place)), **{header: sent})
    assert (response.status, response.error["code"]) == (401, code)
    assert response.error["type"] == "authentication_error"
    assert "`mlxsup key " in response.error["message"]
    assert response.headers["www-authenticate"] == "Bearer"
    assert "x-should-retry" not in response.headers


def test_one_of_two_keys_is_enough(place: KeyPlace) -> None:
    key = new_key(place, "a")
    keys = Keys(place)
    keys.look()
    assert keys.caller([*bearer("other"), (b"x-api-key", key.encode())]).account == "a"
    assert keys.caller([*bearer(key), (b"x-api-key", b"other")]).account == "a"


def test_new_and_revoked_keys_count_with_the_next_look(place: KeyPlace) -> None:
    keys = Keys(place)
    with pytest.raises(Failure):
        keys.caller([])  # the file was not read yet
    assert keys.digests is None
    keys.look()
    assert keys.caller([]) == Caller()
    assert keys.digests == {Caller().key}
    first = new_key(place, "first")
    keys.look()
    assert keys.caller(bearer(first)).account == "first"
    second = new_key(place, "second", account="alice", is_operator=True)
    keys.look()
    assert keys.caller(bearer(second)) == Caller("alice", is_operator=True, key=digest_of(second))
    revoke_key(place, "first")
    site = Site(PlayedDaemon(), keys=keys)
    assert ask(site, x_api_key=first).error["code"] == "invalid_api_key"
    revoke_key(place, "second")
    second = new_key(place, "second", account="alice", is_operator=True)
    assert ask(site, x_api_key=second).status == 200, "the file is as long as it was"
    assert keys.digests == {digest_of(second)}
    revoke_key(place, "second")
    assert ask(site, x_api_key=second).status == 401
    assert ask(site).status == 401, "revoking the last key does not let everybody in"
    turn_off(place)
    assert ask(site).status == 200


def test_required_keys_close_the_gateway_until_there_is_one(place: KeyPlace) -> None:
    site = Site(PlayedDaemon(), "10.0.0.1", Keys(place, are_required=True))
    response = ask(site)
    assert (response.status, response.error["code"]) == (503, "keys_unusable")
    assert response.error["message"].endswith("has none yet; `mlxsup key new NAME` creates one")
    key = new_key(place, "a")
    assert ask(site, x_api_key=key).status == 200
    turn_off(place)
    assert ask(site, x_api_key=key).status == 503


# ---------------------------------------------------------------- keys that were in force (P30)


def status_of(keys: Keys, *headers: tuple[bytes, bytes]) -> int:
    """Return the status of a request with these headers; 503 names both ways out."""
    keys.look()
    try:
        keys.caller(headers)
    except Failure as failure:
        refusal = failure
    else:
        return 200
    if refusal.status == 503:
        assert refusal.code == "keys_unusable"
        assert "`mlxsup key new NAME`" in refusal.message
        assert "`mlxsup key off`" in refusal.message
    return refusal.status


def statuses(keys: Keys, key: str) -> tuple[int, int]:
    """Return the status of a request with a key, and of one without."""
    return status_of(keys, *bearer(key)), status_of(keys)


CLOSED = 503, 503


Damage = Callable[[Path], object]

DAMAGES: dict[str, Damage] = {
    "gone": lambda path: None,
    "empty": lambda path: write(path, ""),
    "no keys": lambda path: write(path, "{}"),
    "a list": lambda path: write(path, "[]"),
    "binary": lambda path: path.write_bytes(b"\xff" * 100),
    "too long": lambda path: write(path, " " * 2_000_000),
    "others can write": lambda path: write(path, "{}", 0o602),
    "others can read": lambda path: write(path, "{}", 0o644),
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/dev/null"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link that is broken": lambda path: path.symlink_to("/nowhere/keys.json"),
}


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("has_mark", [True, False], ids=["", "new runtime folder"])
def test_damaged_file_closes_the_gateway(place: KeyPlace, damage: Damage, has_mark: bool) -> None:
    key = new_key(place, "a")
    keys = Keys(place)
    assert statuses(keys, key) == (200, 401)
    copy = place.file.read_bytes()
    if not has_mark:
        shutil.rmtree(place.mark.parent)
        place.mark.parent.mkdir(mode=0o700)
    place.file.unlink()
    damage(place.file)
    assert statuses(keys, key) == CLOSED
    if has_mark or os.path.lexists(place.file):
        assert statuses(Keys(place), key) == CLOSED, "nor by the next process"
    after = Keys(place, were_in_force=True)
    assert statuses(after, key) == CLOSED, "nor by one that its daemon has told"
    if place.file.is_dir():
        place.file.rmdir()
    place.file.unlink(missing_ok=True)
    place.file.write_bytes(copy)
    place.file.chmod(0o600)
    for one in (keys, after):
        assert statuses(one, key) == (200, 401), "a copy that is put back counts again"


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "gone"])
def test_damaged_file_without_a_mark_closes_the_gateway(place: KeyPlace, damage: str) -> None:
    place.file.parent.mkdir()
    DAMAGES[damage](place.file)
    keys = Keys(place)  # its runtime folder is not there yet
    assert statuses(keys, "a") == CLOSED
    place.file.rename(place.file.with_name("away"))
    assert statuses(keys, "a") == CLOSED


@pytest.mark.parametrize("damage", ["off", "others can read", "a folder", "a pipe"])
def test_damaged_mark_closes_the_gateway(place: KeyPlace, damage: str) -> None:
    key = new_key(place, "a")
    place.file.unlink()
    place.mark.unlink()
    if damage in DAMAGES:
        DAMAGES[damage](place.mark)
    else:
        write(place.mark, damage)
    assert statuses(Keys(place), key) == CLOSED


@contextmanager
def unread(number: int) -> Iterator[None]:
    """Let the system open no file of keys and no mark."""
    with pytest.MonkeyPatch.context() as patch:

        def fail(path: Path, *_: object) -> int:
            raise OSError(number, os.strerror(number), str(path))

        patch.setattr("mlxsup.protocol.key_file.os.open", fail)
        yield


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ENOTDIR])
def test_failure_that_passes_locks_no_gateway_without_keys(place: KeyPlace, number: int) -> None:
    place.file.parent.mkdir()
    place.mark.parent.mkdir()
    keys = Keys(place)
    assert is_open(keys)
    with unread(number):
        assert not is_open(keys)
        with pytest.raises(Failure, match="cannot read its API keys"):
            keys.caller([])
    assert is_open(keys)
    assert is_open(Keys(place)), "nor the next process"


def is_open(keys: Keys) -> bool:
    keys.look()
    with suppress(Failure):
        return keys.caller([]) == Caller()
    return False


@pytest.mark.parametrize("reader", ["between its steps", "over it"])
def test_key_off_opens_at_once_and_refuses_nothing_afterwards(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    key = new_key(place, "a")
    keys = Keys(place)
    seen = [statuses(keys, key)]
    read, steps = read_key_file, [Path.replace, Path.unlink]

    def between(step: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(statuses(keys, key))
            return step(*arguments, **named)

        return call

    def while_it_reads(path: Path) -> bytes | None:
        monkeypatch.setattr(keys_module, "read_key_file", read)
        turn_off(place)
        return read(path)

    if reader == "over it":
        monkeypatch.setattr(keys_module, "read_key_file", while_it_reads)
    else:
        for step in steps:
            monkeypatch.setattr(Path, step.__name__, between(step))
        turn_off(place)
        assert len(seen) > len(steps)
    assert statuses(keys, key) == (200, 200)
    assert set(seen) == {(200, 401)}


def test_mark_that_went_with_the_runtime_folder_is_written_again(
    place: KeyPlace, caplog: pytest.LogCaptureFixture
) -> None:
    new_key(place, "a")
    shutil.rmtree(place.mark.parent)
    keys = Keys(place)
    assert not any(map(is_open, [keys, keys, keys]))
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert str(place.mark.parent) in record.getMessage(), "said once, not with each look"
    place.mark.parent.mkdir(mode=0o700)
    assert not is_open(Keys(place))
    place.file.unlink()
    assert not is_open(Keys(place)), "another daemon knows no more than the mark"


class Life(RuleBasedStateMachine):
    """Commands, cleaners and restarts in any order, which never open the gateway."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._place = place_in(Path(self._folder.name))
        self._keys = Keys(self._place)
        self._valid: dict[str, str] = {}
        self._is_closed = False

    def teardown(self) -> None:
        self._folder.cleanup()

    @rule(name=st.sampled_from("abc"))
    def new(self, name: str) -> None:
        with suppress(KeyFileError):
            key = add_key(self._place, name=name, account=name, is_operator=False, created="")
            if key is not None:
                self._valid = {n: k for n, k in self._valid.items() if n in self._names()}
                self._valid[name] = key
            self._is_closed = True

    @rule(name=st.sampled_from("abc"))
    def revoke(self, name: str) -> None:
        with suppress(KeyFileError):
            revoke_key(self._place, name)
            self._valid.pop(name, None)

    @rule()
    def off(self) -> None:
        turn_off(self._place)
        self._valid, self._is_closed = {}, False

    @rule(length=st.floats(0, 0.9))
    def cut(self, length: float) -> None:
        if self._place.file.exists():
            data = self._place.file.read_bytes()
            self._place.file.write_bytes(data[: int(len(data) * length)])

    @rule()
    def lose_the_file(self) -> None:
        self._place.file.unlink(missing_ok=True)

    @rule()
    def replace_the_runtime_folder(self) -> None:
        shutil.rmtree(self._place.mark.parent, ignore_errors=True)
        self._place.mark.parent.mkdir()

    @rule()
    def restart_the_gateway(self) -> None:
        self._keys = Keys(self._place, were_in_force=self._keys.are_in_force)

    @rule()
    def restart_the_daemon(self) -> None:
        self._keys = Keys(self._place)

    @rule()
    def look_without_a_free_file(self) -> None:
        with unread(errno.EMFILE):
            assert not is_open(self._keys)

    @invariant()
    def is_never_open(self) -> None:
        assert is_open(self._keys) == (not self._is_closed)

    @invariant()
    def lets_in_valid_keys_only(self) -> None:
        self._keys.look()
        names = self._names()
        for name, key in self._valid.items():
            if name in names:
                assert self._keys.caller(bearer(key)).account == name

    def _names(self) -> set[str]:
        with suppress(KeyFileError):
            return {key.name for key in read_keys(self._place.file) or ()}
        return set()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


def is_let_in(keys: Keys, key: str) -> bool:
    with suppress(Failure):
        return keys.caller(bearer(key)).has_key
    return False


def test_disk_that_does_not_answer_closes_the_gateway(
    place: KeyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key(place, "a")
    keys = Keys(place)
    answers, is_asked = threading.Event(), threading.Event()

    def read(path: Path) -> bytes | None:
        is_asked.set()
        answers.wait()
        return read_key_file(path)

    keys.watch()
    assert keys.caller(bearer(key)).account == "a"
    monkeypatch.setattr(keys_module, "read_key_file", read)
    assert is_asked.wait(TIMEOUT_S)
    seconds = 0.0
    while is_let_in(keys, key) and seconds < 60.0:
        keys.pulse()  # of the event loop
        seconds += BEAT_S
    assert 3.0 <= seconds <= 8.0
    with pytest.raises(Failure) as caught:
        keys.caller(bearer(key))
    assert caught.value.code == "keys_unusable"
    answers.set()
    eventually(lambda: is_let_in(keys, key))


def test_beat_tells_of_keys_times_the_disk_and_forgets_what_revoked_ones_had(
    place: KeyPlace,
) -> None:
    key, keys = new_key(place, "a"), Keys(place)
    keys.look()
    gateway, digests = Gateway(AsyncClient, GatewayRules()), [digest_of(key), digest_of("revoked")]
    for digest in digests:
        response = KeptResponse(
            id="r", previous="", json=b"", inputs={}, outputs={}, has_failed=False
        )
        gateway.kept.keep(digest, response)
    read, write = os.pipe()
    config = uvicorn.Config(gateway.app("127.0.0.1", keys), log_config=None)

    async def beat() -> None:
        beating = asyncio.create_task(Server(config, gateway, keys, write)._beat())
        await asyncio.sleep(0)
        beating.cancel()

    asyncio.run(beat())
    assert gateway.kept.find(digests[0], "r")
    with pytest.raises(Failure):
        gateway.kept.find(digests[1], "r")
    for _ in range(9):
        asyncio.run(beat())
    assert not is_let_in(keys, key), "the disk has not answered for so long"
    turn_off(place)
    keys.look()
    asyncio.run(beat())
    assert os.read(read, 99) == BEAT_WITH_KEYS * 10 + BEAT
    os.close(read)
    os.close(write)


def test_unusable_file_is_logged_and_not_told_to_clients(
    place: KeyPlace, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key(place, "a")
    site = Site(PlayedDaemon(), keys=Keys(place))
    assert ask(site, x_api_key=key).status == 200
    place.file.chmod(0o644)
    with caplog.at_level(logging.ERROR):
        responses = [ask(site, x_api_key=key), ask(site)]
    for response in responses:
        assert (response.status, response.error["code"]) == (503, "keys_unusable")
        assert response.headers["x-should-retry"] == "false"
        assert str(place.file) not in response.error["message"]
        assert key not in response.error["message"]
    (record,) = [one for one in caplog.records if one.name == "mlxsup.gateway.keys"]
    assert str(place.file) in record.getMessage()
    place.file.chmod(0o600)
    assert ask(site, x_api_key=key).status == 200


def test_request_belongs_to_the_account_of_its_key(place: KeyPlace) -> None:
    key = new_key(place, "laptop", account="alice")
    daemon = PlayedDaemon(ANSWER, ANSWER)
    site = Site(daemon, keys=Keys(place))
    assert ask(site, CHAT, "POST", BODY, x_api_key=key).status == 200
    turn_off(place)
    assert ask(site, CHAT, "POST", BODY).status == 200
    assert [asked.get("client") for asked in daemon.asked] == ["alice", None]


@pytest.mark.parametrize("host", ["box.example:8484", "10.0.0.1", "", "localhost"])
def test_required_keys_allow_any_host(place: KeyPlace, host: str) -> None:
    key = new_key(place, "a")
    site = Site(PlayedDaemon(), "10.0.0.1", Keys(place, are_required=True))
    assert ask(site, host=host, x_api_key=key).status == 200
    assert ask(site, host=host).status == 401
    loopback = Site(PlayedDaemon(), keys=Keys(place))
    assert ask(loopback, host=host, x_api_key=key).status == (200 if host == "localhost" else 403)


OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {"keep_alive": 0}, {"keep_alive": "-1m"}, {"ttl": -1}, {"keep_alive": 0.001}, {"ttl": 59.9},
    {"keep_alive": "25h"},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_keep_alive_out_of_bounds_needs_an_operator(place: KeyPlace, path: str) -> None:
    user, operator = new_key(place, "user"), new_key(place, "admin", is_operator=True)
    daemon = PlayedDaemon(*[ANSWER] * 16)
    site = Site(daemon, keys=Keys(place))
    body = BODY if path == CHAT else {"model": "m", "prompt": "hi"}
    for field in OUT_OF_BOUNDS:
        refused = ask(site, path, "POST", body | field, x_api_key=user)
        assert (refused.status, refused.error["code"]) == (403, "operator_only")
        assert refused.error["param"] == "keep_alive"
        assert "mlxsup key new NAME --operator" in refused.error["message"]
    assert daemon.asked == []
    for allowed in ({}, {"keep_alive": "1m"}, {"keep_alive": 24 * 3600}):
        assert ask(site, path, "POST", body | allowed, x_api_key=user).status == 200
    assert ask(site, path, "POST", body | OUT_OF_BOUNDS[0], x_api_key=operator).status == 200
    turn_off(place)
    for field in OUT_OF_BOUNDS:
        assert ask(site, path, "POST", body | field).status == 200
