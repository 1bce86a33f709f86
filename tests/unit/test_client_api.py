"""Parameters, endpoints and what the client imports."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client.errors import RequestError
from mlxsup.client.parameters import encode_generate
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import Decoder, decode_body
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.places import check_endpoint, endpoint_in, find_place
from mlxsup.protocol.states import Priority

LIMITS: dict[str, Any] = {
    "timeout_s": None,
    "queue_timeout_s": None,
    "first_token_timeout_s": None,
    "keep_alive": None,
    "notices": False,
    "resume": True,
    "client": None,
    "priority": None,
}


def encoded(model: str = "m", body: dict[str, Any] | None = None, **limits: Any) -> Generate:
    frames = encode_generate(RequestId("r"), model, body or {"prompt": "x"}, **(LIMITS | limits))
    message = Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)
    assert isinstance(message, Generate)
    return message


def test_parameters_arrive_as_they_were_given() -> None:
    message = encoded(
        body={"messages": [{"role": "user", "content": "é"}], "max_tokens": 3, "stop": ["."]},
        timeout_s=2,
        queue_timeout_s=0.5,
        client="someone",
        priority="batch",
    )
    assert (message.timeout_s, message.queue_timeout_s, message.client) == (2.0, 0.5, "someone")
    assert message.priority is Priority.BATCH
    body = decode_body(message.body)
    assert body.messages == [{"role": "user", "content": "é"}]
    assert (body.max_tokens, body.stop) == (3, ["."])


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ({"model": ""}, "model"),
        ({"model": "m" * 129}, "model"),
        ({"model": 3}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"client": ""}, "client"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": 3}, "priority"),
        ({"client": "x" * 1025}, "client"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"timeout_s": math.inf}, "timeout_s"),
        ({"queue_timeout_s": -0.1}, "queue_timeout_s"),
        ({"first_token_timeout_s": "1"}, "first_token_timeout_s"),
        ({"keep_alive": -2}, "keep_alive"),
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"keep_alive": True}, "keep_alive"),
        ({"body": {"prompt": ""}}, "prompt"),
        ({"body": {"prompt": "x", "seed": -1}}, "seed"),
    ],
)
def test_wrong_values_are_refused_by_name_C7(arguments: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        encoded(**arguments)
    assert caught.value.code == "invalid_request"
    assert caught.value.detail["parameter"] == parameter
    assert not caught.value.retryable


def test_longest_client_name_fits_the_strict_header() -> None:
    assert encoded(client="\U0001f600" * 1024).client is not None


def test_endpoint_is_the_named_one_then_that_of_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXSUP_ENDPOINT", "ipc:///from/environment")
    monkeypatch.setenv("HOME", "/home/someone")
    assert find_place("ipc:///named").endpoint == "ipc:///named"
    assert find_place().endpoint == "ipc:///from/environment"
    with pytest.raises(ValueError, match="not ''"):
        find_place("")
    monkeypatch.delenv("MLXSUP_ENDPOINT")
    assert find_place().endpoint == "ipc:///home/someone/.mlxsup/run/client.sock"
    assert endpoint_in(Path("/run/x")) == "ipc:///run/x/client.sock"


@pytest.mark.parametrize(
    "endpoint", ["", "ipc://", "tcp://127.0.0.1:1", "/a/path", f"ipc://{'x' * 104}"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"endpoint|socket path"):
        check_endpoint(endpoint)


def test_client_imports_neither_mlx_nor_anything_heavy_A3() -> None:
    code = (
        "import sys, mlxsup.client\n"
        "heavy = {'mlx', 'mlx_lm', 'pydantic', 'rich', 'numpy', 'asyncio', 'mlxsup.supervisor',"
        " 'mlxsup.worker'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "mlxsup.client.AsyncClient\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['asyncio']"]
