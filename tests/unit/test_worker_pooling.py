"""What embeds and ranks, as folders say; what is asked for; which texts share a pass."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.codec import decode_body, encode_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.pooling import (
    MAX_TEXTS,
    Mode,
    PoolingBody,
    find_pooling,
    pack_vector,
    unpack_vector,
)
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.worker_messages import Dispatch
from mlxsup.worker.engine import Row, RowToken
from mlxsup.worker.engines.mlx.embedding import _Texts, plan_pass
from mlxsup.worker.pooling_rows import PoolingRow

KEY = RequestKey(1)
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
RANKER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"x.{kind}", "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("config", "files", "found"),
    [
        (QWEN, {}, None),
        ({}, {"modules.json": "[1"}, None),
        (BERT, {}, (Task.EMBED, Mode.MEAN, True, "")),
        (BERT, {"modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode_cls_token": True}},
         (Task.EMBED, Mode.CLS, False, "")),
        (QWEN, {"modules.json": modules("Transformer", "Pooling", "Normalize"),
                "1_Pooling/config.json": {"pooling_mode": "lasttoken"}},
         (Task.EMBED, Mode.LAST, True, "")),
        (QWEN, {"modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
         (Task.EMBED, Mode.MEAN, False, "another way than by mean")),
        (QWEN, {"modules.json": modules("Transformer", "LSTM")},
         (Task.EMBED, Mode.MEAN, False, "has a LSTM")),
        (RANKER | {"id2label": {"0": "x"}}, {}, (Task.RERANK, Mode.CLS, False, "")),
        (RANKER | {"id2label": {"0": "x", "1": "y"}}, {},
         (Task.RERANK, Mode.CLS, False, "into 2 classes")),
    ],
)  # fmt: skip
def test_folder_says_what_a_model_makes(
    config: dict[str, Any], files: dict[str, Any], found: Any, tmp_path: Path
) -> None:
    write(tmp_path, files)
    pooling = find_pooling(tmp_path, config)
    if pooling is None or found is None:
        assert pooling is found
        return
    *facts, problem = found
    assert [pooling.task, pooling.mode, pooling.normalises] == facts
    assert problem in pooling.problem
    assert bool(problem) is bool(pooling.problem)


@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"model_type": "roberta", "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta"}, 512),
        ({"model_type": "xlm-roberta", "pad_token_id": 3}, 510),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 2}, None),
        ({"model_type": "bert", "pad_token_id": 1}, None),
    ],
)
def test_roberta_leaves_out_the_places_up_to_that_of_its_padding(
    config: dict[str, Any], most: int | None, tmp_path: Path
) -> None:
    pooling = find_pooling(tmp_path, {"max_position_embeddings": 514, **config})
    assert pooling is not None
    assert pooling.max_tokens == most


SCORES = {"modules.json": modules("Transformer", "LogitScore"),
          "1_LogitScore/config.json": {"true_token_id": 5}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "files", "asked", "found"),
    [
        ("qwen", {}, "", None),
        ("qwen", {}, "last", (Task.EMBED, Mode.LAST, True)),
        ("qwen", {}, "yes_no", (Task.RERANK, Mode.LAST, False)),
        ("qwen", SCORES, "", (Task.RERANK, Mode.LAST, False)),
        ("qwen", SCORES, "mean", (Task.EMBED, Mode.MEAN, False)),
        ("qwen-reranker", {}, "", (Task.RERANK, Mode.LAST, False)),
        ("qwen-reranker", {}, "mean", (Task.EMBED, Mode.MEAN, True)),
    ],
)
def test_entry_says_how_any_model_pools(
    name: str, files: dict[str, Any], asked: str, found: Any, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write(folder, files)
    pooling = find_pooling(folder, QWEN, asked)
    assert found == (pooling and (pooling.task, pooling.mode, pooling.normalises))
    assert pooling is None or not pooling.problem


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"texts": "tide"}, "texts must be a list of texts, not text"),
        ({"texts": []}, "not an empty list"),
        ({"texts": ["a"] * (MAX_TEXTS + 1)}, f"not a list of {MAX_TEXTS + 1}"),
        ({"texts": ["a", 1]}, r"texts\[1\] must be text, or a list of token ids, not 1"),
        ({"texts": [[]]}, "at least one token id"),
        ({"texts": [[-1]]}, "ids from 0"),
        ({"texts": ["\ud800"]}, "lone surrogates"),
        ({"texts": [[1]], "query": "q"}, r"documents\[0\] must be text, not a list"),
        ({"texts": ["a"], "dimensions": 0}, "dimensions must be an integer from 1"),
        ({"texts": ["a"], "truncate": 1}, "truncate must be true or false"),
        ({"texts": ["a"], "query": "q", "dimensions": 3}, "has no effect on a ranking"),
        ({"texts": ["a"], "temperature": 1.0}, "unknown parameter 'temperature' beside texts"),
    ],
)
def test_body_that_is_wrong_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RemoteError, match=words) as caught:
        PoolingBody.from_wire(given)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.detail["parameter"] in given


def test_body_travels_and_is_resumed_from_its_tokens() -> None:
    body = PoolingBody(texts=["a", [1, 2]], dimensions=8, truncate=True)
    assert decode_body(encode_body(body)) == body
    again = PoolingBody.accepted([5, 6, 7], body.parameters() | {"lengths": [1, 2]})
    assert again == PoolingBody(texts=[[5], [6, 7]], dimensions=8)


def row(lengths: list[int], delivered: list[int] | None = None) -> Row:
    tokens = list(range(sum(lengths)))
    return Row(key=KEY, tokens=tokens, max_tokens=len(lengths), seed=0,
               delivered=delivered or [], lengths=tuple(lengths))  # fmt: skip


def of(row: Row) -> PoolingRow:
    sent = Dispatch(key=KEY, priority=Priority.BATCH, may_leave=False, body=b"")
    made = PoolingRow.of(row, sent)
    assert (made.priority, made.may_leave) == (Priority.BATCH, False), "who leaves for memory"
    return made


def test_vector_that_is_no_number_ends_the_request_with_an_error() -> None:
    opened = of(row([1, 1]))
    (first,) = opened.advance(RowToken(key=KEY, token=1, vector=pack_vector([0.5])), 1.0)
    assert (unpack_vector(first.vector or b""), first.finish) == ([0.5], None)
    (last,) = opened.advance(RowToken(key=KEY, token=0, vector=b""), 1.0)
    assert last.finish is FinishReason.STOP
    error = opened.refusal(is_over=True)
    assert error is not None
    assert (error.code, "NaN" in error.message) == (ErrorCode.INTERNAL, True)


def test_request_with_all_its_vectors_needs_no_pass() -> None:
    whole = row([1, 2], delivered=[1, 0])
    (end,) = of(whole).replay(whole) or []
    assert end.finish is FinishReason.STOP
    assert of(row([1, 2], delivered=[1])).replay(whole) is None


@pytest.mark.parametrize("alike", [False, True])
def test_passes_take_every_text_once_and_keep_to_the_budget(alike: bool) -> None:
    waiting = [_Texts.of(row([1 + (7 * n * k) % 90 for n in range(50)])) for k in (1, 3, 5)]
    waiting.append(_Texts.of(row([700])))
    taken: Counter[tuple[int, int]] = Counter()
    while left := [one for one in waiting if one.left]:
        items = plan_pass(left, 512, alike=alike)
        longest = max(item.length for item in items)
        assert len(items) == 1 or len(items) * longest <= 512
        assert not alike or {item.length for item in items} == {longest}
        taken.update((waiting.index(item.texts), item.number) for item in items)
    assert len(taken) == 151
    assert set(taken.values()) == {1}


def test_texts_of_one_request_do_not_fill_a_pass_that_others_wait_for() -> None:
    many, few = _Texts.of(row([40] * 100)), _Texts.of(row([40] * 3))
    items = plan_pass([many, few], 400, alike=False)
    assert [item.texts is few for item in items].count(True) == 3
    assert len(items) == 10
