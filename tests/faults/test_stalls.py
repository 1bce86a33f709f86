"""What never ends in a real engine's text side, and honest work that takes long (P5, P6, P7).

Steps that stall, in Python, in native code and with the interpreter held, and processes that are
stopped: tests/integration/test_daemon_stalls.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxsup.client import RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

TEMPLATE = (
    "{% if 'loops' in messages[0].content %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif 'computes' in messages[0].content %}"
    "{% set n = 8 + messages | length %}{{ n ** (n ** n) }}"
    "{% endif %}{{ messages[0].content }}"
)
LIMIT_S = 0.15
"""Ten times this is what a prompt's preparation may take."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "real")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    models = {
        "real": {"path": str(folder), "preload": True, "step_timeout_s": LIMIT_S}
        | {"restart": PATIENT},
        "forms": {"path": str(folder), "preload": True, "step_timeout_s": 2.0},
        "other": fake(fake={"step_s": 0.005}),
    }
    with Daemon(models) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "real", "READY")
            wait_for_state(client, "forms", "READY")
        yield daemon


@pytest.mark.mlx
@pytest.mark.parametrize("what", ["loops", "computes"])
def test_a_jinja_template_without_end_is_found_whether_it_holds_the_interpreter_P6(
    daemon: Daemon, what: str
) -> None:
    with daemon.client() as client:
        generation = wait_for_state(client, "real", "READY")["generation"]
        other = Reader(client, "other", f"beside {what}", max_tokens=800).started()
        stuck = client.generate(
            "real", messages=[{"role": "user", "content": what}], max_tokens=3, timeout_s=0.5
        )
        with pytest.raises(RequestError) as caught:
            list(stuck)
        assert caught.value.code == "deadline_exceeded", "its own limit holds all the same"
        eventually(lambda: row(client, "real")["generation"] == generation + 1, timeout_s=60.0)
        wait_for_state(client, "real", "READY")
        answer = client.complete(
            "real", messages=[{"role": "user", "content": "fine"}], max_tokens=3
        )
        assert answer.finish_reason == "length"
        assert other.finished().token_ids == undisturbed(f"beside {what}", 800)


@pytest.mark.mlx
@pytest.mark.parametrize(
    "regex",
    ["(x+x+)+y", "(((a{0,100}){0,100}){0,100})", "(.*a.{400})*"],
)
def test_no_regex_of_a_request_stalls_an_engine_P6(daemon: Daemon, regex: str) -> None:
    """Those that other matchers take for ever with; `structured` promises no backtracking."""
    pytest.importorskip("llguidance")
    with daemon.client() as client:
        beside = Reader(client, "forms", "beside", max_tokens=40)
        form = {"type": "regex", "regex": regex}
        result = client.complete("forms", prompt="x", max_tokens=20, response_format=form)
        assert result.finish_reason in ("length", "stop")
        assert set(result.text) <= set("axyb") or ".*" in regex
        assert beside.finished().usage.completion_tokens == 40
        assert row(client, "forms")["generation"] == 1


@contextmanager
def burning_processors() -> Iterator[None]:
    """Two processes for each processor want all of it."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def test_twice_the_load_of_the_processors_kills_nobody_P7() -> None:
    models = {name: fake(fake={"step_s": 0.02}, step_timeout_s=5.0) for name in ("one", "two")}
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        with burning_processors():
            readers = {
                (name, n): Reader(client, name, f"{name} {n}", max_tokens=50)
                for name in models
                for n in range(3)
            }
            for (name, n), reader in readers.items():
                assert reader.finished(120).token_ids == undisturbed(f"{name} {n}", 50)
        assert [row(client, name)["generation"] for name in models] == [1, 1]


def test_a_prompt_of_40000_tokens_on_a_slow_model_is_honest_work_F5_P7() -> None:
    """Its prefill takes many times the limit of a step, in steps that each end."""
    options = {"step_s": 0.05, "prefill_tokens_per_step": 256, "context_length": 50_000}
    with (
        Daemon({"m": fake(fake=options, step_timeout_s=1.5)}) as daemon,
        daemon.client() as client,
    ):
        prompt = "x" * 40_000
        result = client.complete("m", prompt=prompt, max_tokens=3)
        assert result.token_ids == undisturbed(prompt, 3)
        assert (result.usage.prompt_tokens, result.resumed) == (40_000, 0)
        assert row(client, "m")["steps"] > 40_000 // 256
        assert row(client, "m")["generation"] == 1
