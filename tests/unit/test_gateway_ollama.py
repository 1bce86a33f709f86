"""Ollama's API, and LM Studio's lists: what is asked of the daemon, and what comes back."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import (
    FinishReason,
    Notice,
    NoticeKind,
)
from mlxsup.gateway import descriptions as descriptions_module
from mlxsup.gateway import limits
from mlxsup.gateway.keys import Keys
from mlxsup.protocol.client_messages import Timings
from mlxsup.store.model_folder import Description, describe

from support.daemon.hub_caches import MODEL, write_folder
from support.gateway.key_place import new_key, place_in
from support.gateway.pictures import PNG, PNG_BASE64, PNG_URL
from support.gateway.played_gateway import (
    GENERATE,
    HI,
    PlayedDaemon,
    Site,
    delta,
    post,
    result,
    said,
)
from support.gateway.played_gateway import OLLAMA_CHAT as CHAT

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": CITY}}
THINKS, NO_THOUGHT = ({"enable_thinking": yes, "thinking": yes} for yes in (True, False))


# ---------------------------------------------------------------- what is asked


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}, **more}


def turn(**message: Any) -> dict[str, Any]:
    return {"messages": [*HI, message]}


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, {"messages": HI}),
        (CHAT, {"model": "m:latest"}, {"model": "m"}),
        (CHAT, {"model": "n:warm"}, {"model": "m", "temperature": 0.8}),
        (CHAT, {"options": {"num_predict": 5.0, "repeat_penalty": 1.1, "repeat_last_n": 64.0,
                            "temperature": 0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3,
                            "stop": "x", "presence_penalty": 1, "frequency_penalty": 1}},
         {"max_tokens": 5, "repetition_penalty": 1.1, "penalty_window": 64, "temperature": 0,
          "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"], "presence_penalty": 1,
          "frequency_penalty": 1}),
        *((CHAT, {"options": {"num_predict": none, "seed": -1, "top_k": -1, "stop": None}},
           {"max_tokens": None, "seed": None, "top_k": None, "stop": None})
          for none in (0, -1, -2)),
        (CHAT, {"options": {"repeat_last_n": -1}}, {"penalty_window": 0}),
        (CHAT, {"options": {"repeat_last_n": 0, "repeat_penalty": 1.5}},
         {"penalty_window": None, "repetition_penalty": 1.0}),
        (CHAT, {"format": "json"}, {"response_format": {"type": "json_object"}}),
        (CHAT, {"format": ""}, {"response_format": None}),
        (CHAT, {"format": CITY}, {"response_format": {"type": "json_schema", "json_schema": {
            "schema": CITY}}}),
        (CHAT, {"think": True}, {"chat_template_kwargs": THINKS}),
        (CHAT, {"think": "low"}, {"chat_template_kwargs": {**THINKS, "reasoning_effort": "low"}}),
        (GENERATE, {"think": False}, {"chat_template_kwargs": NO_THOUGHT}),
        *((CHAT, {"keep_alive": given}, {"keep_alive": seconds})
          for given, seconds in (("5m0s", 300), ("1h2m3.5s", 3723.5), (60, 60), ("-1m", -1))),
        (CHAT, {"tools": [TOOL], "logprobs": True, "top_logprobs": 2, "priority": "batch"},
         {"tools": [TOOL], "logprobs": True, "top_logprobs": 2, "priority": "batch"}),
        (CHAT, {"tools": []}, {"tools": None}),
        (CHAT, turn(role="user", content="a", images=[PNG_BASE64, PNG_URL]),
         {"messages": [*HI, {"role": "user", "content": [
             *({"type": "image", "data": PNG, "at": f"messages[1].images[{n}]"}
               for n in (0, 1)),
             {"type": "text", "text": "a"}]}]}),
        (GENERATE, {"images": [PNG_BASE64]},
         {"messages": [{"role": "user", "content": [
             {"type": "image", "data": PNG, "at": "images[0]"},
             {"type": "text", "text": "hi"}]}]}),
        (GENERATE, {"prompt": "", "images": [PNG_BASE64]},
         {"messages": [{"role": "user", "content": [
             {"type": "image", "data": PNG, "at": "images[0]"}]}]}),
        (CHAT, turn(role="assistant", thinking="t", tool_calls=[call({"é": 1})]),
         {"messages": [*HI, {"role": "assistant", "content": "", "reasoning_content": "t",
                             "tool_calls": [call('{"é": 1}', type="function")]}]}),
        (CHAT, turn(role="tool", content="sun", tool_name="f"),
         {"messages": [*HI, {"role": "tool", "content": "sun", "name": "f"}]}),
        (CHAT, turn(role="tool", content="sun", tool_call_id="c"),
         {"messages": [*HI, {"role": "tool", "content": "sun", "tool_call_id": "c"}]}),
        (GENERATE, {"system": "s", "template": "", "suffix": "", "context": [], "images": []},
         {"messages": [{"role": "system", "content": "s"}, *HI], "messages_as_text": True}),
        (GENERATE, {"raw": True}, {"prompt": "hi", "messages": None, "messages_as_text": None}),
    ],
)  # fmt: skip
def test_request_becomes_one_of_the_daemon(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    response = post(path, **fields)
    assert response.status == 200, response.body
    assert "x-mlxsup-ignored" not in response.headers
    assert {name: response.asked[0].get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (CHAT, {"x": 1, "options": {"y": 2, "num_ctx": 9, "num_gpu": 1}}, "x, options.y"),
        (CHAT, {"options": {"mirostat": 1, "typical_p": 0.5}},
         "options.mirostat, options.typical_p"),
        (CHAT, {"options": {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1}, "truncate": False}, None),
        (GENERATE, {"raw": True, "think": True}, "think"),
        (GENERATE, {"truncate": True}, "truncate"),
    ],
)  # fmt: skip
def test_field_without_effect_is_named(
    path: str, fields: dict[str, Any], ignored: str | None
) -> None:
    response = post(path, **fields)
    assert (response.status, response.headers.get("x-mlxsup-ignored")) == (200, ignored)


@pytest.mark.parametrize(
    ("path", "fields", "error"),
    [
        (CHAT, {"messages": [1]}, "messages[0] must be an object"),
        (CHAT, turn(role="x"), "messages[1].role must be one of"),
        (CHAT, {"format": "yaml"}, 'format must be "json" or a JSON schema'),
        (CHAT, {"options": {"num_predict": "x"}}, "num_predict must be an integer"),
        (CHAT, {"options": {"repeat_penalty": -1}}, "repeat_penalty must be a number"),
        (CHAT, {"options": {"repeat_last_n": "x"}}, "repeat_last_n must be an integer"),
        (CHAT, {"keep_alive": "1h1m30"}, "keep_alive must be seconds"),
        (GENERATE, {"raw": True, "system": "s"}, "system has no effect with raw"),
        (GENERATE, {"context": [1]}, "context has no effect here"),
        (GENERATE, {"images": ["aGk="]}, "images[0] must be PNG, JPEG"),
        (GENERATE, {"images": [3]}, "images[0] must be a picture in base64"),
        (GENERATE, {"images": PNG_BASE64}, "images must be a list of pictures"),
        (GENERATE, {"raw": True, "images": [PNG_BASE64]}, "images have no effect with raw"),
        (CHAT, turn(role="user", images=["!"]), "messages[1].images[0] must be a picture in"),
        (CHAT, turn(role="system", images=[PNG_BASE64]),
         "messages[1].images[0]: a picture must be in a message of the user"),
    ],
)  # fmt: skip
def test_refusal_is_a_text(path: str, fields: dict[str, Any], error: str) -> None:
    response = post(path, **fields)
    assert (response.status, response.asked) == (400, [])
    assert response.json().keys() == {"error"}
    assert response.json()["error"].startswith(error)


# ---------------------------------------------------------------- what comes back

TIMINGS = Timings(
    queued_s=1.0, tokenize_s=0.25, prefill_s=0.5, first_token_s=1.75, paused_s=3.0, total_s=7.0
)
FIGURES = {
    "total_duration": 7_000_000_000, "load_duration": 1_000_000_000, "prompt_eval_count": 5,
    "prompt_eval_duration": 750_000_000, "eval_count": 2, "eval_duration": 2_250_000_000,
}  # fmt: skip


def message(content: str = "", **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content, **more}}


@pytest.mark.parametrize("stream", [True, False])
def test_end_says_why_and_what_it_took(stream: bool) -> None:
    end = result("ab", FinishReason.LENGTH, timings=TIMINGS, warnings=["w"])
    last = post(CHAT, delta("ab"), end, stream=stream).lines()[-1]
    assert last.items() >= (FIGURES | {"done_reason": "length", "warnings": ["w"]}).items()


def test_durations_that_clients_divide_by_are_never_zero() -> None:
    last = post(CHAT).lines()[-1]
    named = ("total_duration", "prompt_eval_duration", "eval_duration", "load_duration")
    assert [last[name] for name in named] == [1, 1, 1, 0]


def test_model_with_any_name_is_named_in_each_line() -> None:
    first = post(CHAT, model="\0", stream=True).lines()[0]
    assert (first["model"], first["message"]["content"]) == ("\0", "a")


def test_line_of_a_waiting_answer_is_still_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    loading = Notice(kind=NoticeKind.LOADING, detail={"fraction": 0.5})
    (turns := asyncio.Event()).set()
    response = post(CHAT, loading, turns, *said("a"), stream=True)
    assert response.body.startswith(b" {")
    assert response.lines()[0].items() >= (message("a") | {"done": False}).items()


# ---------------------------------------------------------------- empty requests


@pytest.mark.parametrize(
    ("path", "fields", "reason", "asked"),
    [
        (CHAT, {"messages": []}, "load", {}),
        (CHAT, {"messages": None, "keep_alive": "10m"}, "load", {"keep_alive": 600}),
        (CHAT, {"messages": [], "keep_alive": 0}, "unload", {"keep_alive": 0}),
        (GENERATE, {"prompt": "", "keep_alive": -1, "stream": True}, "load", {"keep_alive": -1}),
        (GENERATE, {"prompt": None, "keep_alive": 0}, "unload", {"keep_alive": 0}),
        (CHAT, {"messages": [], "timeout_s": 5}, "load", {"timeout_s": 5}),
        (GENERATE, {"prompt": "", "format": "json", "options": {"num_predict": 9}}, "load", {}),
    ],
)
def test_empty_request_is_one_for_a_token_that_is_not_shown(
    path: str, fields: dict[str, Any], reason: str, asked: dict[str, Any]
) -> None:
    response = post(path, **{"stream": True} | fields)
    one = {"model": "m", "prompt": " ", "max_tokens": 1, "cap_max_tokens": True}
    assert response.asked == [one | asked]
    empty = message() if path == CHAT else {"response": ""}
    (line,) = response.lines()
    assert line.items() >= (empty | {"done": True, "done_reason": reason}).items()
    assert len(line) == len(empty) + 4, "no figures"


@pytest.mark.parametrize(
    ("state", "model", "count"), [("STOPPED", "n:latest", 0), ("FAILED", "m", 0), ("READY", "m", 1)]
)
def test_model_that_is_not_loaded_is_not_loaded_to_unload_it(
    state: str, model: str, count: int
) -> None:
    daemon = PlayedDaemon([result()])
    daemon.state = state
    body = {"model": model, "keep_alive": 0}
    response = asyncio.run(Site(daemon).ask("POST", GENERATE, body))
    assert (response.json()["done_reason"], len(daemon.asked)) == ("unload", count)


def test_only_an_operator_unloads(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    guest, boss = new_key(place, "guest"), new_key(place, "boss", is_operator=True)
    daemon = PlayedDaemon([result()])
    site = Site(daemon, keys=Keys(place))

    def unload(key: str) -> int:
        body, headers = {"model": "m", "keep_alive": 0}, {"x-api-key": key}
        return asyncio.run(site.ask("POST", GENERATE, body, headers=headers)).status

    assert [unload(key) for key in ("", guest, boss)] == [401, 403, 200]
    assert daemon.asked[0]["client"] == "boss"


# ---------------------------------------------------------------- models

CONFIG = {
    "model_type": "qwen3", "quantization": {"bits": 4, "group_size": 64},
    "max_position_embeddings": 40960,
}  # fmt: skip
TEMPLATE = "{% if tools %}{% endif %}{% if enable_thinking %}{% endif %}"


def got(path: str, daemon: PlayedDaemon, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the body of a response."""
    method = "GET" if body is None else "POST"
    response = asyncio.run(Site(daemon).ask(method, path, body))
    assert response.status == 200, response.body
    return response.json()


@pytest.fixture
def daemon(tmp_path: Path) -> PlayedDaemon:
    """A daemon whose model has files and a preset."""
    files = {
        "config.json": CONFIG,
        "tokenizer_config.json": {"chat_template": TEMPLATE},
        "generation_config.json": {"do_sample": True, "repetition_penalty": 2},
        "model.safetensors.index.json": {
            "weight_map": {}, "metadata": {"total_parameters": 8_190_735_360},
        },
    }  # fmt: skip
    write_folder(tmp_path, MODEL)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    for file in (*tmp_path.iterdir(), tmp_path):
        os.utime(file, (1e9, 1e9))
    daemon = PlayedDaemon()
    daemon.presets = {"warm": {"temperature": 0.8}}
    daemon.row = {"folder": str(tmp_path), "repo": "mlx-community/Qwen3-8B", "revision": "main",
                  "context_length": None, "unloads_in_s": 60.0, "footprint_bytes": 77}  # fmt: skip
    return daemon


DETAILS = {"parent_model": "", "format": "mlx", "family": "qwen3", "families": ["qwen3"],
           "parameter_size": "8.2B", "quantization_level": "4bit"}  # fmt: skip


def test_tags_list_models_and_presets(daemon: PlayedDaemon) -> None:
    one, preset = got("/api/tags", daemon)["models"]
    assert [row["name"] for row in (one, preset)] == ["m:latest", "m:warm"]
    assert (one["model"], one["details"]) == ("m:latest", DETAILS)
    assert one["size"] == len(MODEL["model.safetensors"])
    assert (len(one["digest"]), int(one["digest"], 16) > 0) == (64, True)
    assert one["modified_at"] == "2001-09-09T01:46:40Z"
    assert one["capabilities"] == ["completion", "tools", "thinking"]
    daemon.presets = {"latest": {}}
    listed = got("/api/tags", daemon)["models"]
    assert [row["name"] for row in listed] == ["m", "m:latest"], "each name is that of one"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *((name, {"repeat_penalty": 2}) for name in ("m", "n", "m:latest")),
        ("n:warm", {"repeat_penalty": 2, "temperature": 0.8}),
    ],
)
def test_show_describes_a_model(
    name: str, parameters: dict[str, float], daemon: PlayedDaemon
) -> None:
    value = got("/api/show", daemon, {"name": name})
    assert value["capabilities"] == ["completion", "tools", "thinking"]
    assert (value["details"], value["template"]) == (DETAILS, TEMPLATE)
    info = value["model_info"]
    assert (info["general.architecture"], info["qwen3.context_length"]) == ("qwen3", 40960)
    assert info["general.parameter_count"] == 8_190_735_360
    pairs = [line.split() for line in value["parameters"].splitlines()]
    assert {word: float(number) for word, number in pairs}.items() >= parameters.items()


@pytest.mark.parametrize(("left_s", "days"), [(60.0, 0), (0.0, 0), (None, 36500)])
def test_ps_lists_what_is_loaded(left_s: float | None, days: int, daemon: PlayedDaemon) -> None:
    daemon.row |= {"unloads_in_s": left_s, "context_length": 9}
    (one,) = got("/api/ps", daemon)["models"]
    assert (one["name"], one["size"], one["size_vram"]) == ("m:latest", 77, 77)
    assert one["context_length"] == 9
    left = datetime.fromisoformat(one["expires_at"]) - datetime.now(UTC)
    assert left > timedelta(days=days) - timedelta(minutes=1)
    assert left.days <= days
    daemon.state = "LOADING"
    assert got("/api/ps", daemon) == {"models": []}


@pytest.mark.parametrize(
    ("task", "reads", "made", "said", "kind", "newer"),
    [
        ("generate", None, "text", ["completion"], "llm", "llm"),
        ("generate", ["text", "image"], "text", ["completion", "vision"], "vlm", "llm"),
        ("embed", None, "embeddings", ["embedding"], "embeddings", "embedding"),
        ("rerank", None, "scores", [], "rerank", "rerank"),
    ],
)
def test_each_list_says_what_a_model_reads_and_makes(
    task: str,
    reads: list[str] | None,
    made: str,
    said: list[str],
    kind: str,
    newer: str,
    daemon: PlayedDaemon,
) -> None:
    daemon.row |= {"task": task, "folder": None, "context_length": 9}
    if reads:
        daemon.row["capabilities"] = ["text", "images"]
    assert got("/v1/models", daemon)["data"][0]["architecture"] == {
        "input_modalities": reads or ["text"],
        "output_modalities": [made],
    }
    assert got("/api/tags", daemon)["models"][0]["capabilities"] == said
    assert got("/api/show", daemon, {"model": "m"})["capabilities"] == said
    assert got("/api/v0/models", daemon)["data"][0]["type"] == kind
    new = got("/api/v1/models", daemon)["models"][0]
    assert (new["type"], new["capabilities"]["vision"]) == (newer, bool(reads))


def test_model_without_files_is_listed_all_the_same(daemon: PlayedDaemon) -> None:
    daemon.row |= {"folder": None, "context_length": 7}
    one, _ = got("/api/tags", daemon)["models"]
    assert (one["size"], one["details"]["families"]) == (0, [])
    shown = got("/api/show", daemon, {"model": "m"})
    assert (shown["capabilities"], shown["template"]) == (["completion"], "")
    assert shown["model_info"]["unknown.context_length"] == 7
    daemon.row["folder"] = "/nowhere"
    assert got("/api/v0/models", daemon)["data"][0]["arch"] == ""


def test_folder_is_read_again_once_it_has_changed(
    daemon: PlayedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def noted(folder: Path) -> Description:
        read.append(folder)
        return describe(folder)

    monkeypatch.setattr(descriptions_module, "describe", noted)
    folder = Path(daemon.row["folder"])

    async def run() -> list[str]:
        site, found = Site(daemon), []
        async with site.life():
            for licence, at in (("", 0), ("", 0), ("mit", 2e9), ("mit", 0), ("isc", 1.5e9)):
                if at:  # a copy of older files may be put back, too
                    (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
                    os.utime(folder / "README.md", (at, at))
                shown = await site.ask("POST", "/api/show", {"model": "m"}, has_life=False)
                tags = await site.ask("GET", "/api/tags", has_life=False)
                assert shown.json()["license"] == licence
                found.append(tags.json()["models"][0]["digest"])
            daemon.row["revision"] = "v2"
            tags = await site.ask("GET", "/api/tags", has_life=False)
        return [*found, tags.json()["models"][0]["digest"]]

    first, second, third, fourth, fifth, sixth = asyncio.run(run())
    assert (first, third) == (second, fourth)
    assert len({first, third, fifth, sixth}) == 4, "of other files, and of another revision"
    assert read == [folder] * 3


def test_disk_that_does_not_answer_leaves_a_gap(
    daemon: PlayedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STATUS_LIMIT_S", 0.0)
    goes_on = threading.Event()
    begun: list[Path] = []

    def stuck(folder: Path) -> Description:
        begun.append(folder)
        goes_on.wait()
        return describe(folder)

    monkeypatch.setattr(descriptions_module, "describe", stuck)

    async def run() -> list[int]:
        site = Site(daemon)
        async with site.life():
            tags = [await site.ask("GET", "/api/tags", has_life=False) for _ in range(3)]
            goes_on.set()
        return [one.json()["models"][0]["size"] for one in tags]

    assert asyncio.run(run()) == [0, 0, 0]
    assert len(begun) <= 1, "one thread waits for it"


def test_lm_studio_lists_models(daemon: PlayedDaemon) -> None:
    daemon.row["context_length"] = 9
    old = {
        "id": "m", "object": "model", "type": "llm", "publisher": "mlx-community", "arch": "qwen3",
        "compatibility_type": "mlx", "quantization": "4bit", "state": "loaded",
        "max_context_length": 9, "loaded_context_length": 9, "capabilities": ["tool_use"],
    }  # fmt: skip
    listed = got("/api/v0/models", daemon)
    assert (listed["object"], listed["data"]) == ("list", [old, old | {"id": "m:warm"}])
    assert got("/api/v0/models/n", daemon) == old
    assert got("/api/v0/models/m:warm", daemon)["id"] == "m:warm"
    new = got("/api/v1/models", daemon)["models"][0]
    assert (new["key"], new["params_string"], new["format"]) == ("m", "8.2B", "mlx")
    assert new["loaded_instances"] == [{"id": "m", "config": {"context_length": 9}}]
    assert new["quantization"] == {"name": "4bit", "bits_per_weight": 4}
    assert new["capabilities"] == {"vision": False, "trained_for_tool_use": True}
    daemon.state = "STOPPED"
    assert got("/api/v1/models", daemon)["models"][0]["loaded_instances"] == []
    stopped = got("/api/v0/models/m", daemon)
    assert (stopped["state"], "loaded_context_length" in stopped) == ("not-loaded", False)


@pytest.mark.parametrize("path", ["/api/v0/models/nope", "/api/v0/nope", "/api/v1/nope"])
def test_errors_of_lm_studios_paths_are_those_of_openai(daemon: PlayedDaemon, path: str) -> None:
    response = asyncio.run(Site(daemon).ask("GET", path))
    assert (response.status, response.error["type"]) == (404, "invalid_request_error")


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("POST", "/api/pull", 403, "only the page at / may do this"),
        ("DELETE", "/api/delete", 403, "only the page at / may do this"),
        ("POST", "/api/create", 501, "`mlxsup convert SOURCE`"),
        ("POST", "/api/copy", 501, "`mlxsup convert SOURCE TARGET`"),
        ("POST", "/api/push", 501, "nothing is published"),
        ("GET", "/api/chat", 405, "the method must be POST"),
        ("GET", "/api/nothing", 404, "no such path"),
    ],
)
def test_what_is_not_there_is_said_in_a_text(
    method: str, path: str, status: int, error: str
) -> None:
    response = asyncio.run(Site(PlayedDaemon()).ask(method, path, {"model": "m"}))
    assert response.status == status
    assert error in response.json()["error"]


@pytest.mark.parametrize("name", ["x", "m:cold", 1, None])
def test_unknown_model_is_not_shown(name: Any) -> None:
    body = {"model": name}
    response = asyncio.run(Site(PlayedDaemon()).ask("POST", "/api/show", body))
    assert response.status == (404 if isinstance(name, str) else 400)
    assert isinstance(response.json()["error"], str)
