"""The gateway's spawn contract: addresses that are safe to listen at, and its spec."""

from __future__ import annotations

import pytest

from mlxsup.protocol.gateway import (
    Address,
    GatewayRules,
    GatewaySpec,
    gateway_argv,
    is_local_origin,
    is_loopback,
)

SPEC = GatewaySpec(
    endpoint="ipc:///run/client.sock", host="::1", port=8484, listener=5, beat_pipe=6,
    supervisor_pid=7, key_file="/c.keys.json", key_mark="/run/mark", has_had_keys=True,
    log_level="debug",
    rules=GatewayRules(
        names=(("gpt-*", "m"), ("x", "m:warm")), hosts=("ai.example",),
        origins=("https://chat.example",), needs_keys=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("127.0.0.1:8484", "127.0.0.1:8484"),
        ("127.9.9.9:1", "127.9.9.9:1"),
        ("localhost:80", "127.0.0.1:80"),
        ("[::1]:8484", "[::1]:8484"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("127.0.0.1:65535", "127.0.0.1:65535"),
    ],
)
def test_addresses_of_this_machine_are_taken(text: str, shown: str) -> None:
    address = Address.parse(text)
    assert (str(address), address.url) == (shown, f"http://{shown}")
    assert is_loopback(address.host)


@pytest.mark.parametrize("text", ["0.0.0.0:8484", "[::]:8484", "192.168.1.5:80", "8.8.8.8:80"])
def test_addresses_that_others_reach_are_known_as_such(text: str) -> None:
    address = Address.parse(text)
    assert str(address) == text
    assert not is_loopback(address.host)


@pytest.mark.parametrize(
    "text",
    ["", "8484", ":8484", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "a.b:80",
     "127.0.0.1:-1", "127.0.0.1:٣", "http://127.0.0.1:80", "127.0.0.1:123456"],
)  # fmt: skip
def test_what_is_no_address_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address of this machine and a port"):
        Address.parse(text)


def test_a_spec_is_read_as_it_was_written() -> None:
    line = SPEC.to_line()
    assert (line.count(b"\n"), GatewaySpec.from_line(line)) == (1, SPEC)


@pytest.mark.parametrize(
    "line", [b"", b"{}\n", b"[]\n", SPEC.to_line()[:-1], b"x" * 70_000 + b"\n"]
)
def test_what_is_no_spec_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="a gateway's spec"):
        GatewaySpec.from_line(line)


@pytest.mark.parametrize(
    "origin",
    ["http://localhost:3000", "http://localhost", "https://127.0.0.1", "http://127.3.0.1:8",
     "http://[::1]:8", "tauri://localhost", "http://a.localhost:80"],
)  # fmt: skip
def test_origins_of_this_machine_are_known_as_such(origin: str) -> None:
    assert is_local_origin(origin)


@pytest.mark.parametrize(
    "origin",
    ["", "null", "localhost", "https://ai.example", "http://localhost.evil.example", "http://10.0.0.1",
     "http://127.0.0.1.evil.example", "http://[2001:db8::1]", "app://-", "http://evil:80",
     "http://alocalhost"],
)  # fmt: skip
def test_origins_of_others_are_none_of_this_machine(origin: str) -> None:
    assert not is_local_origin(origin)


def test_a_gateway_does_not_import_from_the_working_folder() -> None:
    assert gateway_argv("py") == ["py", "-P", "-m", "mlxsup.gateway"]
