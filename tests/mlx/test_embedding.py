"""Models that embed or rank, on tiny weights: against transformers, alone and in company."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.pooling import PoolingBody, unpack_vector
from mlxsup.protocol.tasks import Task
from mlxsup.worker.engine import BadLaunchError, BadModelError, EngineFacts, Rank, Row
from mlxsup.worker.engines.mlx import embedding, encoders
from mlxsup.worker.engines.mlx.embedding import FILL, EmbeddingEngine, pass_memory
from mlxsup.worker.engines.mlx.embedding_text import EmbeddingText
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.estimate import estimate
from mlxsup.worker.engines.opening import open_engine

from support.model_types.build import make_model
from support.models.tiny_encoder import make_tiny_encoder, write_modules
from support.worker.turn_bench import make_spec

Texts = Sequence[str | list[int]]

SHORT, LONG = [3, 5, 9, 2], [3, *(4 + at % 11 for at in range(70)), 2]

EXPECTED = {
    "bert": ([0.08213, -0.1525, 0.19934], [0.06414, -0.0098, 0.07581]),
    "modernbert": ([-0.00368, 0.0646, 0.20172], [0.36663, 0.1212, -0.01559]),
    "nomic_bert": ([-0.01015, -0.18187, 0.12922], [-0.22673, -0.00747, -0.03123]),
    "xlm-roberta": ([0.04182, -0.03892, 0.06997], [0.04448, 0.02008, 0.05583]),
}
"""The first numbers for two texts, by transformers 5.24 with torch on a CPU: the mean of the last
hidden states of the same folder, normalised."""


def name_tokens(folder: Path, names: Mapping[int, str]) -> None:
    """Give tokens of a tokenizer other names."""
    content = json.loads((folder / "tokenizer.json").read_text())
    model = content["model"]
    before = {number: name for name, number in model["vocab"].items()}
    gone = {before[number] for number in names}
    model["vocab"] = {names.get(number, name): number for number, name in before.items()}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if "".join(pair) not in gone]
    (folder / "tokenizer.json").write_text(json.dumps(content))


class Loaded:
    """An engine after its load, and short ways to drive it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        spec = make_spec(engine="mlx", path=str(folder), **settings)
        engine = open_engine(spec, time.perf_counter)
        assert isinstance(engine, EmbeddingEngine)
        self.engine = engine
        self.facts: EngineFacts = engine.load(lambda phase, at: None)
        self.sizes: list[list[int]] = []

    def insert(self, key: int, texts: Texts, delivered: Sequence[int] = (), **asked: Any) -> None:
        prompt = self.engine.text.encode_texts(PoolingBody(texts=list(texts), **asked))
        self.engine.insert(
            Row(
                key=RequestKey(key),
                tokens=prompt.tokens,
                max_tokens=len(prompt.lengths),
                seed=0,
                delivered=list(delivered),
                lengths=prompt.lengths,
                dimensions=asked.get("dimensions") or 0,
            )
        )

    def run(self) -> dict[int, dict[int, list[float]]]:
        """Step until nothing is left; return the vectors by key and number, each once."""
        found: dict[int, dict[int, list[float]]] = {}
        while self.engine.row_count():
            result = self.engine.step()
            self.sizes.append([token.key for token in result.tokens])
            for token in result.tokens:
                assert token.token is not None
                assert token.vector is not None
                assert token.token not in found.setdefault(token.key, {})
                found[token.key][token.token] = unpack_vector(token.vector)
        return found

    def vectors(self, texts: Texts, **asked: Any) -> list[list[float]]:
        self.insert(1, texts, **asked)
        by_number = self.run()[1]
        return [by_number[number] for number in range(len(texts))]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = make_tiny_encoder(tmp_path_factory.mktemp("bert") / "m", "bert", mode="cls_token")
    return Loaded(folder, max_concurrency=8)


@pytest.mark.parametrize("name", EXPECTED)
def test_encoder_gives_the_numbers_of_transformers(name: str, tmp_path: Path) -> None:
    loaded = Loaded(make_tiny_encoder(tmp_path / "m", name))
    found = [vector[:3] for vector in loaded.vectors([SHORT, LONG])]
    np.testing.assert_allclose(found, EXPECTED[name], atol=2e-5)
    assert loaded.facts.dimensions == 32


@pytest.mark.parametrize(
    ("name", "score"), [("bert ranks", 0.51182), ("xlm-roberta ranks", 0.79157)]
)
def test_ranking_gives_the_scores_of_transformers(name: str, score: float, tmp_path: Path) -> None:
    loaded = Loaded(make_tiny_encoder(tmp_path / "m", name))
    pair = [3, 12, 13, 2, 4, 5, 6, 2]
    loaded.engine.insert(
        Row(key=RequestKey(1), tokens=pair, max_tokens=1, seed=0, lengths=(len(pair),))
    )
    assert loaded.run()[1][0] == pytest.approx([score], abs=2e-5)
    assert not loaded.facts.dimensions
    best, worst = loaded.vectors(["tide moss", "what is a river"], query="tide")
    assert 0 < best[0] < 1
    assert best != worst


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "lfm2"])
def test_decoder_embeds_without_its_output_layer(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / name, name)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    bare = {n.removeprefix("model."): w for n, w in weights.items() if not n.startswith("lm_head")}
    mx.save_safetensors(str(folder / "model.safetensors"), bare)
    write_modules(folder, "lasttoken")
    loaded = Loaded(folder)
    together = loaded.vectors([SHORT, LONG])
    np.testing.assert_allclose(
        together, [*loaded.vectors([SHORT]), *loaded.vectors([LONG])], atol=1e-4
    )
    assert loaded.facts.warnings == ()


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3", "last"), ("qwen3", "mean"), ("lfm2", "cls"), ("gpt_oss", "mean")]
)
def test_decoder_reads_a_long_text_in_parts(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(make_model(tmp_path / name, name), pooling=mode)
    whole = loaded.vectors([LONG, LONG[:40]])
    monkeypatch.setattr(encoders, "BLOCK", 16)
    model = type(loaded.engine._model.inner.model)  # type: ignore[union-attr]
    widths, read = [], model.__call__

    def watched(self: Any, ids: mx.array, *given: Any, **named: Any) -> Any:
        widths.append(ids.shape[1])
        return read(self, ids, *given, **named)

    monkeypatch.setattr(model, "__call__", watched)
    np.testing.assert_allclose(loaded.vectors([LONG, LONG[:40]]), whole, atol=1e-4)
    assert set(widths) == {16, 8}


def test_encoder_looks_at_a_long_text_in_parts(
    bert: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, scored = bert.vectors([LONG]), []
    attend = mx.fast.scaled_dot_product_attention

    def watched(queries: mx.array, *given: Any, **named: Any) -> mx.array:
        scored.append(queries.shape[2])
        return attend(queries, *given, **named)

    monkeypatch.setattr(encoders, "BLOCK", 16)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", watched)
    np.testing.assert_allclose(bert.vectors([LONG]), whole, atol=1e-6)
    assert set(scored) == {16, 8}


def make_two_sided(folder: Path, mode: str = "mean_tokens", **changes: Any) -> Path:
    """Write a decoder whose tokens see both sides, as EmbeddingGemma's do."""
    make_model(folder, "gemma3_text")
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_bidirectional_attention": True, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_modules(folder, mode)
    return folder


def test_two_sided_decoder_reads_a_long_text_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(make_two_sided(tmp_path / "m"))
    texts = [LONG, LONG[:50]]
    whole = loaded.vectors(texts)
    monkeypatch.setattr(encoders, "BLOCK", 16)
    np.testing.assert_allclose(loaded.vectors(texts), whole, atol=1e-5)
    others = loaded.vectors([[*LONG[:-2], 7, 9], [*LONG[:48], 7, 9]])
    assert abs(np.array(others) - whole).max() > 1e-3, "the first tokens see the last"


def test_two_sided_window_is_half_on_each_side(tmp_path: Path) -> None:
    narrow = {"sliding_window": 2, "sliding_window_pattern": 99}  # no layer sees the whole text
    loaded = Loaded(make_two_sided(tmp_path / "m", "lasttoken", **narrow))
    reach = len(loaded.engine._model.inner.model.layers)  # type: ignore[union-attr]
    (whole,) = loaded.vectors([LONG])
    for distance, is_seen in ((reach, True), (reach + 1, False)):
        text = list(LONG)
        text[-1 - distance] = 20
        (other,) = loaded.vectors([text])
        assert (abs(np.array(other) - whole).max() > 1e-6) == is_seen, distance


@pytest.mark.parametrize(("name", "block"), [("modernbert", 64), ("two-sided", 64), ("qwen3", 16)])
def test_a_pass_over_one_long_text_takes_what_is_stated(
    name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 1024
    monkeypatch.setattr(encoders, "BLOCK", block)
    monkeypatch.setattr(embedding, "CPU_PASS_TOKENS", block)
    folder = tmp_path / "m"
    if name == "modernbert":
        make_tiny_encoder(folder, name)
    elif name == "qwen3":
        make_model(folder, name)
        write_modules(folder, "lasttoken")
    else:
        make_two_sided(folder)
    model = Loaded(folder).engine._model
    assert model is not None
    config = json.loads((folder / "config.json").read_text())
    [part] = pass_memory(model, config, "cpu", tokens)
    ids = mx.array([[4 + at % 11 for at in range(tokens)]])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(ids, mx.array([tokens]), None))
    taken = mx.get_peak_memory() - before
    assert 2 * part.row_bytes / 3 < taken <= 2 * part.row_bytes


def test_worker_reports_what_was_estimated(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "m", "bert", mode="mean_tokens")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert estimate(folder).layers == Loaded(folder).facts.cache_layers


SCORE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
    "{% set q = messages | selectattr('role', 'eq', 'query') | first %}fits"
)


def make_ranking_decoder(folder: Path, name: str, *, fits_not: int | None = 9) -> Path:
    """Write a decoder that ranks by the logits of token 7, less those of another one."""
    make_model(folder, name)
    (folder / "chat_template.jinja").write_text(SCORE_TEMPLATE)
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 7, "false_token_id": fits_not}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    kinds = {"": "Transformer", "1_LogitScore": "LogitScore"}
    modules = [{"path": path, "type": f"x.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"task": "find moss"}, "default_prompt_name": "task"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3_text"])
@pytest.mark.parametrize("fits_not", [9, None])
def test_decoder_ranks_by_the_logits_of_its_answers(
    name: str, fits_not: int | None, tmp_path: Path
) -> None:
    loaded = Loaded(make_ranking_decoder(tmp_path / "m", name, fits_not=fits_not))
    documents = ["tide moss", "what is a river", "x" * 90]
    scores = [score for (score,) in loaded.vectors(documents, query="tide")]
    model, tokenizer = load(str(tmp_path / "m"))
    for document, score in zip(documents, scores, strict=True):
        text = f"system find moss query tide document {document} fits"
        ids = tokenizer.encode(text, add_special_tokens=False)
        logits = model(mx.array([ids]))[0, -1].tolist()
        against = 0.0 if fits_not is None else logits[fits_not]
        assert score == pytest.approx(1 / (1 + math.exp(against - logits[7])), abs=1e-4)


def test_document_that_is_cut_leaves_the_question_whole(tmp_path: Path) -> None:
    loaded = Loaded(make_ranking_decoder(tmp_path / "m", "qwen3"), context_length=64)
    _, tokenizer = load(str(tmp_path / "m"))
    body = PoolingBody(texts=["moss river " * 90, "moss"], query="tide", truncate=True)
    prompt = loaded.engine.text.encode_texts(body)
    cut = tokenizer.decode(prompt.tokens[: prompt.lengths[0]])
    assert 48 < prompt.lengths[0] <= 64
    assert cut.startswith("system find moss query tide document moss river")
    assert cut.endswith("fits")
    with pytest.raises(RemoteError, match="tokens"):
        loaded.engine.text.encode_texts(PoolingBody(texts=["moss river " * 90], query="tide"))


def test_decoder_with_a_layer_for_scores_ranks(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    layer = mx.random.normal((1, config["hidden_size"]), key=mx.random.key(3))
    kept = {name: array for name, array in weights.items() if not name.startswith("lm_head")}
    mx.save_safetensors(str(folder / "model.safetensors"), kept | {"score.weight": layer})
    loaded = Loaded(folder)
    [score] = loaded.vectors(["tide moss"], query="tide")
    body = PoolingBody(texts=["tide moss"], query="tide")
    ids = loaded.engine.text.encode_texts(body).tokens
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]})
    )
    model, _ = load(str(folder))
    last = model.model(mx.array([ids]))[0, -1]
    assert score == pytest.approx([mx.sigmoid((layer @ last).astype(mx.float32)).item()], abs=1e-4)


def test_model_that_changes_its_logits_cannot_rank_by_them(tmp_path: Path) -> None:
    folder = make_ranking_decoder(tmp_path / "m", "granite")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    with pytest.raises(BadModelError, match="cannot be used for rankings"):
        Loaded(folder)


@pytest.mark.parametrize(
    ("place", "pooling", "task"),
    [
        ("Qwen3-Reranker-0.6B-4bit", "", Task.RERANK),
        ("models--x--Qwen3-Reranker-4B/snapshots/0a1b", "", Task.RERANK),
        ("m", "yes_no", Task.RERANK),
        ("Qwen3-0.6B", "", Task.GENERATE),
    ],
)
def test_qwen_reranker_is_known_by_its_name_or_its_entry(
    place: str, pooling: str, task: Task, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / place, "qwen3")
    if task is Task.RERANK:
        name_tokens(folder, {2040: "yes", 2041: "no"})
    engine = open_engine(make_spec(engine="mlx", path=str(folder), pooling=pooling), time.monotonic)
    facts = engine.load(lambda phase, at: None)
    assert facts.task is task
    engine.close()
    if task is Task.RERANK and not pooling:
        loaded = Loaded(folder)
        asked = PoolingBody(texts=["moss"], query="tide")
        _, tokenizer = load(str(folder))
        text = tokenizer.decode(loaded.engine.text.encode_texts(asked).tokens)
        assert "<Query>: tide\n<Document>: moss<|im_end|>\n<|im_start|>assistant" in text
        assert text.endswith("</think>\n\n")


def test_text_among_others_is_the_text_alone_at_every_edge(bert: Loaded) -> None:
    lengths = [n + d for n in range(FILL, 8 * FILL, FILL) for d in (-1, 0, 1)]
    texts = [[4 + (at * n) % 11 for at in range(n)] for n in lengths]
    alone = [bert.vectors([text])[0] for text in texts]
    np.testing.assert_allclose(bert.vectors(texts), alone, atol=1e-5)
    assert max(map(len, bert.sizes)) > 1, "no pass was shared"


def test_resumed_request_gets_what_is_missing_and_no_more(bert: Loaded) -> None:
    texts: list[list[int]] = [[4 + n % 11] * (1 + n % 40) for n in range(60)]
    bert.insert(1, texts)
    whole = bert.run()[1]
    bert.insert(2, texts, delivered=[n for n in whole if n % 3])
    again = bert.run()[2]
    assert sorted(again) == [n for n in range(60) if not n % 3]
    for number, vector in again.items():
        np.testing.assert_allclose(vector, whole[number], atol=1e-5)


def test_one_text_waits_for_one_pass_of_another_request(bert: Loaded) -> None:
    bert.insert(1, [[5] * 60] * 200)
    bert.engine.step()
    bert.insert(2, [[6] * 3])
    seen = [{token.key for token in bert.engine.step().tokens} for _ in range(2)]
    assert RequestKey(2) in set.union(*seen)
    assert bert.engine.has_long_prompt()
    bert.engine.remove(RequestKey(1))
    assert not bert.engine.row_count()


def test_first_long_text_is_given_more_time_for_each_of_its_tokens(tmp_path: Path) -> None:
    """Otherwise the supervisor takes its pass for one that is stuck."""
    folder = make_tiny_encoder(tmp_path / "m", "bert", mode="cls_token")
    loaded = Loaded(folder, max_concurrency=8)
    loaded.insert(1, [[5] * 40])
    short_s = loaded.engine.predict_step_s()
    assert short_s > 0.0, "the load has timed a pass"
    loaded.engine.remove(RequestKey(1))
    loaded.insert(2, [[5] * 120])
    assert loaded.engine.predict_step_s() > 2 * short_s


def test_short_texts_do_not_lower_what_a_long_one_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where a token takes as long as its text has tokens."""
    loaded = Loaded(make_tiny_encoder(tmp_path / "m", "bert"), max_concurrency=8)
    now, compute = [0.0], loaded.engine._compute

    def slow(texts: Sequence[Sequence[int]], size: int) -> Any:
        now[0] += len(texts) * size * size / 1000
        return compute(texts, size)

    monkeypatch.setattr(embedding, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loaded.engine, "_compute", slow)
    for key in range(40):
        loaded.insert(key, [[5] * (4 if key else 120)])
        loaded.run()
    loaded.insert(50, [[5] * 120])
    predicted_s, began = loaded.engine.predict_step_s(), now[0]
    loaded.run()
    assert predicted_s > now[0] - began


def test_16_bits_that_overflow_are_computed_in_32(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "m", "bert", dtype=mx.float16, scale=60000.0)
    loaded = Loaded(folder)
    assert "32 bits" in loaded.facts.warnings[0]
    assert np.isfinite(loaded.vectors([SHORT, LONG])).all()


def test_short_text_beside_a_long_one_is_a_number_in_16_bits(tmp_path: Path) -> None:
    loaded = Loaded(make_tiny_encoder(tmp_path / "m", "modernbert", dtype=mx.float16))
    assert loaded.facts.warnings == ()
    alone = loaded.vectors([SHORT])
    np.testing.assert_allclose(loaded.vectors([SHORT, LONG])[:1], alone, atol=1e-2)


def test_in_a_window_every_token_sees_one_also_what_only_fills_up() -> None:
    """Scores without any are NaN on a GPU; a CPU takes them for equal ones."""
    (block,) = encoders.blocks_of(mx.array([2, 16]), 16, window=3)
    seen = np.array(block.mask)[:, 0]
    near = np.abs(np.subtract.outer(np.arange(16), np.arange(16))) <= 3
    assert (seen[1] == near).all()
    assert (seen[0] == (near & (np.arange(16) < 2) | np.eye(16, dtype=bool))).all()


def test_damaged_weights_are_the_model_s_fault(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "m", "bert", scale=float("nan"))
    with pytest.raises(BadModelError, match="NaN"):
        Loaded(folder)


@pytest.mark.parametrize(
    ("texts", "asked", "words"),
    [
        (["tide " * 300], {}, "texts\\[0\\] has 302 tokens, and this model reads 160"),
        ([[64]], {}, "below this model's vocabulary of 64"),
        (["tide"], {"dimensions": 33}, "at most the 32 of this model"),
        (["tide"], {"input_type": "poem"}, "input_type must be one of document, query"),
        (["tide"], {"query": "moss"}, "makes embeddings, not rankings"),
    ],
)
def test_what_does_not_fit_is_refused(
    bert: Loaded, texts: Texts, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(RemoteError, match=words):
        bert.insert(1, texts, **asked)
    with pytest.raises(RemoteError, match="not text"):
        bert.engine.text.encode(RequestBody(prompt="hello"))


def test_tokens_of_a_text_are_those_that_are_embedded(bert: Loaded) -> None:
    text = bert.engine.text
    asked = RequestBody(prompt="Tide moss", tokenize={})
    tokens = text.encode(asked).tokens
    assert tokens == text.encode_texts(PoolingBody(texts=["Tide moss"])).tokens
    bare = text.encode(RequestBody(prompt="Tide moss", tokenize={"add_special_tokens": False}))
    assert bare.tokens == tokens[1:-1]
    ids = RequestBody(prompt_tokens=bare.tokens, tokenize={})
    assert text.encode(ids).tokens == bare.tokens
    assert text.prompt_text(ids, bare.tokens).lower() == "tide moss"
    with pytest.raises(RemoteError, match="below this model's vocabulary of 64"):
        text.encode(RequestBody(prompt_tokens=[64], tokenize={}))


def test_a_cut_vector_has_length_1_whatever_the_model_says(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "bert", "bert", mode="mean_tokens")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))  # none normalises
    loaded = Loaded(folder)
    whole, cut = (
        float(np.linalg.norm(loaded.vectors(["tide"], dimensions=size)[0])) for size in (None, 4)
    )
    assert abs(whole - 1.0) > 0.1
    assert cut == pytest.approx(1.0)


def test_cut_texts_and_cut_vectors(bert: Loaded) -> None:
    (cut,) = bert.vectors(["tide " * 300], truncate=True)
    (short,) = bert.vectors(["tide"], dimensions=4)
    (whole,) = bert.vectors(["tide"])
    assert len(cut) == len(whole) == 32
    limit = bert.facts.context_length
    (cut_ids,) = bert.vectors([[7] * (limit + 1)], truncate=True)
    assert cut_ids == pytest.approx(bert.vectors([[7] * limit])[0], abs=1e-6)
    assert short == pytest.approx(np.array(whole[:4]) / np.linalg.norm(whole[:4]), abs=1e-6)


def test_makers_words_stand_before_a_text(tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path / "m", "bert")
    write_modules(folder, "mean_tokens", prompts={"query": "what is ", "passage": "river "})
    loaded = Loaded(folder)
    asked, said, plain = (
        loaded.vectors(["tide"], **kind)[0]
        for kind in ({"input_type": "query"}, {"input_type": "document"}, {})
    )
    assert asked == pytest.approx(loaded.vectors(["what is tide"])[0], abs=1e-6)
    assert said == pytest.approx(loaded.vectors(["river tide"])[0], abs=1e-6)
    assert plain not in (asked, said)
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"default_prompt_name": "query"}))
    assert Loaded(folder).vectors(["tide"])[0] == pytest.approx(asked, abs=1e-6)


def test_the_codec_of_another_thread_reads_texts_while_this_one_does(bert: Loaded) -> None:
    text = bert.engine.text
    assert isinstance(text, EmbeddingText)
    asked = PoolingBody(texts=["Tide moss"])
    twin, expected = text.twin(), text.encode_texts(asked)
    with text._in_use:
        assert not twin._in_use.locked()
        assert twin.encode_texts(asked) == expected


def test_pooling_of_an_entry_makes_an_embedding_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "qwen3", "qwen3")
    plain = open_engine(make_spec(engine="mlx", path=str(folder)), time.perf_counter)
    assert isinstance(plain, MlxEngine)
    last, mean = (Loaded(folder, pooling=mode).vectors([SHORT]) for mode in ("last", "mean"))
    assert last != mean


@pytest.mark.parametrize(
    ("pooling", "adapters", "rank", "said"),
    [
        ("mean", {"a": "/a"}, None, "adapters need a model that answers with text"),
        ("mean", {}, Rank(number=0, addresses=("a:1", "b:1")), "hosts need a model that answers"),
        ("", {"a": "/a"}, Rank(number=0, addresses=("a:1", "b:1")), "adapters must be left out"),
    ],
)
def test_what_a_model_cannot_be_asked_for_is_refused_before_its_load(
    tmp_path: Path, pooling: str, adapters: dict[str, str], rank: Rank | None, said: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    spec = make_spec(engine="mlx", path=str(tmp_path), pooling=pooling, adapters=adapters)
    with pytest.raises(BadLaunchError, match=said):
        open_engine(spec, time.perf_counter, rank=rank)
