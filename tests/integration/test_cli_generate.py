"""What `mlxsup generate` sends, and what it says of answers in which there is nothing to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Deltas, Generate, StatusQuery
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Channel, FinishReason

from support.cli import ESCAPE, Terminal, run_cli
from support.pieces import piece
from support.scripted_supervisor import (
    Peer,
    Script,
    ScriptedSupervisor,
    answer,
    finish,
    scripted_supervisor,
    send_pieces,
)

PROMPT = "What is the capital of France?"


def script_of(
    *models: str, texts: tuple[str, ...] = ("Par", "is"), reason: FinishReason = FinishReason.STOP
) -> Script:
    """A daemon with these models, all of which give the same answer."""

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": name} for name in models])
        elif isinstance(message, Generate):
            send_pieces(peer, message.id, list(texts))
            finish(peer, message.id, len(texts), reason)

    return script


def run(supervisor: ScriptedSupervisor, *arguments: str) -> tuple[int, str, str]:
    done = run_cli("generate", *arguments, "--endpoint", supervisor.endpoint)
    return done.returncode, done.stdout, done.stderr


def sent(supervisor: ScriptedSupervisor) -> dict[str, Any]:
    """The body of the latest request."""
    return decode_body(supervisor.got(Generate)[-1].body).to_wire()


def test_the_prompt_is_a_message_for_the_template_unless_it_is_raw(path: Path) -> None:
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT) == (0, "Paris", "")
        user = {"role": "user", "content": PROMPT}
        assert sent(supervisor) == {"messages": [user], "messages_as_text": True}
        assert run(supervisor, "m", PROMPT, "--system", "Be brief.") == (0, "Paris", "")
        system = {"role": "system", "content": "Be brief."}
        assert sent(supervisor) == {"messages": [system, user], "messages_as_text": True}
        assert run(supervisor, "m", PROMPT, "--raw") == (0, "Paris", "")
        assert sent(supervisor) == {"prompt": PROMPT}


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (["--top-k", "5", "--min-p", "0.1"], {"top_k": 5, "min_p": 0.1}),
        (
            ["--no-think"],
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (["--think"], {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            ["--schema", "SCHEMA"],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "integer"}},
                }
            },
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_become_parameters(
    path: Path, tmp_path: Path, options: list[str], parameters: dict[str, Any]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    given = [str(schema) if option == "SCHEMA" else option for option in options]
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT, *given) == (0, "Paris", "")
        body = sent(supervisor)
    assert {name: body[name] for name in body if not name.startswith("messages")} == parameters


def test_the_only_model_need_not_be_named(path: Path) -> None:
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, PROMPT) == (0, "Paris", "")
        assert supervisor.got(Generate)[0].model == "m"
        assert sent(supervisor)["messages"][0]["content"] == PROMPT
        # Its name alone is no prompt.
        status, out, err = run(supervisor, "m")
        assert (status, out) == (64, "")
        assert "Missing argument 'PROMPT'" in err
        assert len(supervisor.got(Generate)) == 1
        chatted = run_cli("chat", "--endpoint", supervisor.endpoint, stdin="hi\n")
        assert (chatted.returncode, chatted.stdout) == (0, "Paris\n")


def test_one_of_several_models_must_be_named(path: Path) -> None:
    with scripted_supervisor(path, script_of("b", "a")) as supervisor:
        status, out, err = run(supervisor, PROMPT)
        assert (status, out) == (64, "")
        assert err.splitlines()[0] == "error: name a model; configured: a, b"
        assert "`mlxsup generate a PROMPT" in err
        status, out, err = run(supervisor, PROMPT, "--json")
        assert json.loads(out)["error"]["code"] == "usage"
        assert supervisor.got(Generate) == []


@pytest.mark.parametrize(
    ("texts", "reason", "remark"),
    [
        ((), FinishReason.STOP, "the answer is empty: the model ended it at once"),
        ((" ", "\n"), FinishReason.STOP, "the answer is nothing but white space"),
        (("x",), FinishReason.LENGTH, ""),
    ],
)
def test_an_empty_answer_says_so_on_stderr(
    path: Path, texts: tuple[str, ...], reason: FinishReason, remark: str
) -> None:
    with scripted_supervisor(path, script_of("m", texts=texts, reason=reason)) as supervisor:
        told = f"{remark}\n" if remark else ""
        assert run(supervisor, "m", PROMPT) == (0, "".join(texts), told)
        where = ("--endpoint", supervisor.endpoint)
        done = run_cli("generate", "m", PROMPT, "--json", *where)
        assert (json.loads(done.stdout)["text"], done.stderr) == ("".join(texts), "")
        with Terminal("generate", "m", PROMPT, *where) as terminal:
            shown = ESCAPE.sub("", terminal.end()).splitlines()
        assert ([remark] == shown[-1:]) == bool(remark)


def test_an_answer_that_somebody_has_cancelled_is_no_success(path: Path) -> None:
    script = script_of("m", texts=("Par",), reason=FinishReason.CANCELLED)
    with scripted_supervisor(path, script) as supervisor:
        assert run(supervisor, "m", PROMPT) == (1, "Par", "cancelled after 1 token\n")
        done = run_cli("generate", "m", PROMPT, "--json", "--endpoint", supervisor.endpoint)
        assert (json.loads(done.stdout)["finish_reason"], done.stderr) == ("cancelled", "")
        assert done.returncode == 1


def test_an_answer_that_is_all_reasoning_says_why(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            thought = piece(message.id, 0, "Let me see", channel=Channel.REASONING)
            peer.send(Deltas(deltas=[thought]))
            finish(peer, message.id, 1, FinishReason.LENGTH)

    with scripted_supervisor(path, script) as supervisor:
        status, out, err = run(supervisor, "m", PROMPT, "--max-tokens", "1")
    assert (status, out) == (0, "")
    assert err == "no answer: the limit of tokens came while the model was still reasoning\n"
