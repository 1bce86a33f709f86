"""LoRA adapters: rows of one batch have different ones, and each has its answer of alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import BadModelError, ModelMissingError, Row, RowToken
from mlxsup.worker.engines.mlx.adapters import read_adapters

from support.model_types.build import make_model
from support.models.adapters import make_adapter
from support.models.tiny_model import as_4_bit, make_tiny_model
from support.worker.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    run_rows,
    solo,
    token_ids,
)

pytestmark = pytest.mark.mlx

PROMPT = [(7 * n + n // 13) % 250 for n in range(40)]
BYTES = 64 << 20


BASES: dict[str, Callable[[Path], Path]] = {
    "llama": make_tiny_model,
    "llama 4 bit": lambda parent: as_4_bit(make_tiny_model(parent)),
    "qwen3": lambda parent: make_model(parent, "qwen3"),
    "mixtral": lambda parent: make_model(parent, "mixtral"),
}


@pytest.fixture(scope="module", params=list(BASES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BASES[request.param](tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    parent = tmp_path_factory.mktemp("adapters")
    one = make_adapter(parent / "one", base, seed=1, rank=2)
    two = make_adapter(parent / "two", base, seed=2, rank=4, layers=("q_proj", "o_proj"))
    return {"one": str(one), "two": str(two)}


def rows_of(**changes: Any) -> list[Row]:
    """Two bare rows, and one with each adapter; no prompt is as long as another."""
    names = ["", "one", "", "two"]
    return [
        make_row(n, PROMPT[: 40 - 3 * n], adapter=name, top_logprobs=3, **changes)
        for n, name in enumerate(names)
    ]


def shown(got: list[RowToken]) -> list[tuple[int | None, Any]]:
    return [(one.token, one.logprobs) for one in got]


SEEDED = {"temperature": 1.0, "seed": 7}


@pytest.mark.parametrize(
    ("base", "way", "changes"),
    [
        *((name, Batching.TOGETHER, {}) for name in BASES),
        *(("llama", way, SEEDED) for way in Batching),
    ],
    indirect=["base"],
)
def test_rows_with_adapters_have_the_bits_of_each_alone(
    base: Path, adapters: dict[str, str], way: Batching, changes: dict[str, Any]
) -> None:
    known = known_as(base, way)
    with loaded_engine(base, adapters=adapters, known_batching=known) as engine:
        assert engine.facts.batching is way
        alone = [shown(run_rows(engine, [row])[row.key]) for row in rows_of(**changes)]
        together = run_rows(engine, rows_of(**changes))
        check_no_row_is_left(engine)
    assert [shown(together[n]) for n in range(4)] == alone
    if changes:  # of the same model, in another way
        return
    with loaded_engine(base, known_batching=known) as engine:
        bare = [replace(row, adapter="") for row in rows_of(**changes)]
        without = [shown(run_rows(engine, [row])[row.key]) for row in bare]
    for n in range(4):
        assert (without[n] == alone[n]) is (n in (0, 2)), n


def test_an_adapter_gives_what_mlx_lm_computes_with_it_in_either_layout(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    own = make_adapter(tmp_path / "own", base, seed=3)
    peft = make_adapter(tmp_path / "peft", base, seed=3, is_peft=True)
    model = load_adapters(load_model(base)[0], str(own))
    logits = model(mx.array([PROMPT]))[0, -1]
    expected = (logits - mx.logsumexp(logits)).max().item()
    for folder in (own, peft):
        with loaded_engine(base, adapters={"a": str(folder)}) as engine:
            row = make_row(1, PROMPT, max_tokens=1, adapter="a", top_logprobs=1)
            (token,) = run_rows(engine, [row])[1]
        assert token.token == mx.argmax(logits).item()
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(expected, abs=1e-4)


def test_an_adapter_reads_prompts_in_each_way(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folders = {"a": str(make_adapter(tmp_path / "a", base))}
    answers = []
    for way in Batching:
        with loaded_engine(base, adapters=folders, known_batching=known_as(base, way)) as engine:
            row = make_row(1, PROMPT, adapter="a", top_logprobs=2, prompt_logprobs=1)
            engine.insert(row)
            told, got = [], []
            while engine.row_count():
                step = engine.step()
                got += shown(step.tokens)
                told += [one for read in step.prefill for one in read.logprobs]
            plain = shown(run_rows(engine, [replace(row, prompt_logprobs=None)])[1])
            answers.append((told, got))
            assert plain == got, way
    assert answers[0] == answers[1] == answers[2]


def test_caches_of_one_adapter_serve_no_other(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folders = {n: str(make_adapter(tmp_path / n, base, seed=ord(n))) for n in "ab"}
    names = ["", "a", "b"]
    with loaded_engine(base, adapters=folders) as engine:
        alone = [solo(engine, make_row(n, PROMPT, adapter=name)) for n, name in enumerate(names)]
    with loaded_engine(base, adapters=folders, prefix_cache_bytes=BYTES) as engine:
        for again in range(2):
            for n, name in enumerate(names):
                row = make_row(10 * again + n, PROMPT, adapter=name)
                assert engine.insert(row) == (len(PROMPT) - 1 if again else 0), name
                assert token_ids(run_rows(engine)[row.key]) == alone[n], name


def test_a_row_that_was_set_aside_goes_on_from_its_own_state(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folders = {"a": str(make_adapter(tmp_path / "a", base))}
    with loaded_engine(base, adapters=folders) as engine:
        whole = solo(engine, make_row(1, PROMPT, adapter="a"))
        engine.insert(make_row(30, PROMPT, adapter="a"))
        got: list[int] = []
        while len(got) < 5:
            got += [one.token for one in engine.step().tokens if one.token is not None]
        (aside,) = engine.set_aside(RequestKey(30), keep=True)
        assert aside.is_kept
        assert aside.token is not None
        assert aside.token.token is not None
        got.append(aside.token.token)
        back = make_row(30, PROMPT, adapter="a", delivered=got)
        assert engine.insert(back) == len(PROMPT) + len(got) - 1
        assert got + token_ids(run_rows(engine)[30]) == whole
        check_no_row_is_left(engine)


def test_each_point_of_an_answer_continues_with_its_adapter(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folders = {"a": str(make_adapter(tmp_path / "a", base))}
    with loaded_engine(base, adapters=folders) as engine:
        row = make_row(1, PROMPT, adapter="a", temperature=1.0, seed=5)
        whole = solo(engine, row)
        for done in range(1, len(whole), 3):
            rest = solo(engine, replace(row, delivered=whole[:done]))
            assert whole[:done] + rest == whole, done


def test_16_adapters_answer_in_one_batch_as_alone(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folders = {
        f"a{n}": str(make_adapter(tmp_path / str(n), base, seed=n, rank=1 + n % 4))
        for n in range(16)
    }
    with loaded_engine(base, adapters=folders, max_concurrency=16) as engine:
        rows = [make_row(n, PROMPT, 4, adapter=name) for n, name in enumerate(folders)]
        alone = [solo(engine, row) for row in rows]
        together = run_rows(engine, rows)
    assert [token_ids(together[n]) for n in range(16)] == alone
    assert len({tuple(answer) for answer in alone}) > 8, "adapters differ"


Change = Callable[[Path], None]


def configured(**changes: Any) -> Change:
    """Change entries of the configuration, also those of its parameters."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text())
        parameters = config["lora_parameters"]
        for name, value in changes.items():
            (parameters if name in parameters else config)[name] = value
        file.write_text(json.dumps(config))

    return change


def rearranged(change: Callable[[dict[str, mx.array]], dict[str, mx.array]]) -> Change:
    """Change the matrices."""

    def write(folder: Path) -> None:
        file = str(folder / "adapters.safetensors")
        arrays: Any = mx.load(file)
        mx.eval(arrays)
        mx.save_safetensors(file, change(dict(arrays)))

    return write


Q = "model.layers.0.self_attn.q_proj.lora_a"


def shorten(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def break_configuration(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "no file": (lambda f: (f / "adapters.safetensors").unlink(), ModelMissingError,
                "adapters.safetensors does not exist"),
    "no configuration": (lambda f: (f / "adapter_config.json").unlink(), ModelMissingError,
                         "adapter_config.json does not exist"),
    "half a file": (shorten, BadModelError, "is incomplete"),
    "no JSON": (break_configuration, BadModelError,
                "is not JSON"),
    "dora": (configured(fine_tune_type="dora"), BadModelError, 'must be lora, not "dora"'),
    "full": (configured(fine_tune_type="full"), BadModelError, 'must be lora, not "full"'),
    "rank": (configured(rank=8), BadModelError, "has the rank 4, but adapter_config.json says 8"),
    "scale": (configured(scale="2"), BadModelError, 'scale must be a number, not "2"'),
    "half a pair": (rearranged(lambda a: {n: v for n, v in a.items() if n != Q}), BadModelError,
                    "q_proj.lora_a is missing"),
    "other array": (rearranged(lambda a: a | {"model.norm.weight": mx.zeros(4)}), BadModelError,
                    "model.norm.weight is no part of a LoRA adapter"),
    "nan": (rearranged(lambda a: a | {Q: a[Q] * mx.nan}), BadModelError, "not numbers"),
    "other layer": (rearranged(lambda a: {n.replace("layers.0", "layers.9"): v
                                          for n, v in a.items()}), BadModelError,
                    "which this model does not have"),
    "other shape": (rearranged(lambda a: a | {Q: a[Q][1:]}), BadModelError,
                    "it is an adapter of another model"),
    "embedding": (rearranged(lambda a: {n.replace("layers.0.self_attn.q_proj", "embed_tokens"): v
                                        for n, v in a.items()}), BadModelError,
                  "adapters change linear layers alone"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_is_refused_in_a_sentence_that_names_it(name: str, tmp_path: Path) -> None:
    change, kind, words = WRONG[name]
    base = make_tiny_model(tmp_path / "base")
    good = make_adapter(tmp_path / "good", base)
    change(bad := make_adapter(tmp_path / "bad", base))
    folders = {"fine": str(good), "sql": str(bad)}
    with pytest.raises(kind, match=words) as caught, loaded_engine(base, adapters=folders):
        pass
    assert str(caught.value).startswith("adapter sql: ")
    assert str(bad) in str(caught.value)


def test_a_stabilised_rank_divides_by_its_root(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    folder = make_adapter(tmp_path / "peft", base, seed=3, rank=4, is_peft=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    scales = []
    for is_stabilised in (False, True):
        (folder / "adapter_config.json").write_text(
            json.dumps(config | {"use_rslora": is_stabilised})
        )
        [adapter] = read_adapters({"a": str(folder)})
        scales.append(adapter.scale)
    assert scales == [config["lora_alpha"] / 4, config["lora_alpha"] / 2]
