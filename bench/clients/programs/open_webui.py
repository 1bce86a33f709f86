"""Open WebUI by its own HTTP interface, as its page in a browser uses it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ...peers import free_port
from .turns import SAY, Turn, TurnFailed
from support.cli import run_cli
from support.daemon import row
from support.eventually import eventually

START_LIMIT_S = 300.0
"""The first start makes its database."""

ASK_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0


def turn(given: Turn) -> None:
    """Lists the models, loads the only one, and chats with it.

    Raises:
        TurnFailed: one of the three did not happen.
    """
    key = _operator_key(given)
    with _running(given, key) as page:
        models = [model["id"] for model in page.ask("/api/models")["data"]]
        if models != ["m"]:
            raise TurnFailed(f"it lists {models}")
        page.ask("/openai/config/update", _connection(given, key))
        page.ask("/openai/models/0/load", {"model": "m"})
        with given.daemon.client() as client:
            eventually(lambda: row(client, "m")["state"] == "READY")
        asked = {"model": "m", "messages": [{"role": "user", "content": SAY}], "stream": False}
        answer = page.ask("/api/chat/completions", asked)
        given.demand(answer["choices"][0]["message"]["content"])


def _operator_key(given: Turn) -> str:
    """A key with which models may be loaded."""
    done = run_cli(
        "key", "new", "webui", "--operator", "--json", "--config", str(given.daemon.config)
    )
    if done.returncode != 0:
        raise TurnFailed(done.stderr)
    return str(json.loads(done.stdout)["key"])


def _connection(given: Turn, key: str) -> dict[str, Any]:
    """Its settings of a connection to llama.cpp, whose routes load and unload."""
    return {
        "ENABLE_OPENAI_API": True,
        "OPENAI_API_BASE_URLS": [f"{given.daemon.url}/v1"],
        "OPENAI_API_KEYS": [key],
        "OPENAI_API_CONFIGS": {"0": {"enable": True, "provider": "llama.cpp"}},
    }


class _Page:
    """What its page in a browser asks it."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._token = ""

    def sign_in(self) -> bool:
        """Whether it answers; nobody needs a password."""
        try:
            empty = {"email": "", "password": ""}
            self._token = self.ask("/api/v1/auths/signin", empty)["token"]
        except (TurnFailed, URLError, ConnectionError, HTTPException):
            return False
        return True

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request."""
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self._url + path, data, headers), timeout=ASK_LIMIT_S) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            with error:
                raise TurnFailed(f"{path}: {error.code} {error.read()[:200]!r}") from None


@contextmanager
def _running(given: Turn, key: str) -> Iterator[_Page]:
    """The program, from its start to its end."""
    port = free_port()
    variables = given.variables | {
        "DATA_DIR": str(given.home / "data"),
        "ENABLE_OLLAMA_API": "False",
        "ENABLE_VERSION_UPDATE_CHECK": "False",
        "HF_HUB_OFFLINE": "1",
        "OFFLINE_MODE": "True",
        "OPENAI_API_BASE_URL": f"{given.daemon.url}/v1",
        "OPENAI_API_KEY": key,
        "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it fetches a model for its own use
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
    }
    (given.home / "data").mkdir()
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            [str(given.environment.bin / "open-webui"), "serve", "--host", "127.0.0.1",
             "--port", str(port)],
            cwd=given.work, env=variables, stdin=subprocess.DEVNULL, stdout=printed,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        page = _Page(port)

        def is_up() -> bool:
            if process.poll() is not None:
                printed.seek(0)
                raise TurnFailed(" ".join(printed.read().split())[-400:])
            return page.sign_in()

        try:
            eventually(is_up, timeout_s=START_LIMIT_S, what="its start")
            yield page
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
