"""The engine for models that turn texts into vectors: no row lives from step to step, but texts do.

A step is one pass over texts of about the same length, of as many requests as there are. The next
request in turn chooses the length with its longest text that is left, so that one text waits for a
pass of each other request and never for all of their texts. What a request has been given is never
computed again: after a crash it comes back with the numbers of those texts.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.context_length import find_context_length
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.pooling import Pooling
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.text import log_line

from ...engine import (
    BadModelError,
    Engine,
    EngineBytes,
    EngineFacts,
    ReportProgress,
    Row,
    RowPrefill,
    RowSetAside,
    RowToken,
    StepResult,
    TextCodec,
)
from .engine import (
    IMPORTED,
    MATERIALISED,
    WEIGHTS_FOUND,
    LoadSteps,
    check_weights,
    find_folder,
    memory_warnings,
    open_device,
)
from .folder import ModelFolder, fingerprint, reading_ahead
from .imports import naming_what_is_missing
from .shapes import round_up

if TYPE_CHECKING:
    from .embedding_text import EmbeddingText
    from .limits import MemoryLimits
    from .pooled import PooledModel

PASS_TOKENS = 16384
CPU_PASS_TOKENS = 2048
"""Tokens of a pass at most, with those that fill texts up, unless one text has more."""

LEAST_PASS_TOKENS = 256
FIRST_PASS_TOKENS = 512
"""Before it is known how long a pass takes."""

PASS_TEXTS = 256
"""Texts of a pass at most: their vectors travel in one message."""

FILL = 8
"""Texts are filled up to a multiple of this length, so that passes have fewer different shapes."""

SHORT = 32
"""Below this length a text may share a pass with any longer one: the pass costs the same."""

SMOOTHING = 0.2
"""The weight of the latest pass in what a token is thought to take."""

MOST_GROWTH = 8.0
"""A token of a longer text may take as many times as long as the text is longer than any so far,
and at most so many times."""

CAUTION = 3.0
"""A pass may take this many times as long as it is thought to."""

PROBE_LENGTHS = (2, 7, 16, 33)
"""Of the texts that are tried alone and together before a model is READY."""

EXACT, HALF = 2e-4, 3e-2
"""How far the numbers of a text may be from those of the text alone, by the largest of them, in
32-bit floats and in others."""

PROBE_VERSION = "1"

logger = logging.getLogger(__name__)


NO_DRAFTS = "drafts have no effect: it answers with vectors, not with text"
"""The warning for a model whose configuration lets rows guess."""


@dataclass(slots=True)
class _Texts:
    """The texts of a request that are left.

    Attributes:
        row: the request.
        begins: where each text begins among its tokens.
        left: the length and the number of each, the shortest first.
        done: tokens of texts with a vector.
        has_begun: whether a pass of this life has read any.
    """

    row: Row
    begins: list[int]
    left: list[tuple[int, int]]
    done: int = 0
    has_begun: bool = False

    @classmethod
    def of(cls, row: Row) -> _Texts:
        begins, at = [], 0
        for length in row.lengths:
            begins.append(at)
            at += length
        known = set(row.delivered)
        left = [(n, number) for number, n in enumerate(row.lengths) if number not in known]
        return cls(row, begins, sorted(left), done=at - sum(n for n, _ in left))

    def tokens(self, number: int) -> list[int]:
        begin = self.begins[number]
        return self.row.tokens[begin : begin + self.row.lengths[number]]


@dataclass(frozen=True, slots=True)
class _Item:
    """A text of a pass."""

    texts: _Texts
    number: int
    length: int


def filled(length: int) -> int:
    """Return the length that a text is filled up to."""
    return round_up(length, FILL)


def plan_pass(waiting: Sequence[_Texts], budget: int, *, alike: bool) -> list[_Item]:
    """Take the texts of the next pass out of those that are left.

    Args:
        waiting: the requests, the next in turn first.
        budget: tokens, with those that fill texts up; one text may have more.
        alike: whether only texts of the same length may share a pass.
    """
    longest, number = waiting[0].left.pop()
    items = [_Item(waiting[0], number, longest)]
    size = filled(longest)
    most = min(PASS_TEXTS, max(1, budget // size))
    least = longest if alike else 0 if longest <= SHORT else longest // 2
    # A share for each request, and then what is left over: no request fills a pass alone.
    for share in (max(1, most // len(waiting)), most):
        for texts in waiting:
            end = bisect_left(texts.left, (longest + 1, -1))
            begin = bisect_left(texts.left, (least, -1))
            count = min(share, most - len(items), end - begin)
            if count > 0:
                taken = texts.left[end - count : end]
                del texts.left[end - count : end]
                items += [_Item(texts, number, length) for length, number in reversed(taken)]
    return items


class EmbeddingEngine(Engine):
    """A model that embeds or ranks; nothing decodes, and nothing is kept of rows.

    Args:
        spec: the worker's launch spec.
        pooling: how the model pools.
    """

    def __init__(self, spec: LaunchSpec, pooling: Pooling) -> None:
        self._spec = spec
        self._pooling = pooling
        self._model: PooledModel | None = None
        self._stream: Any = None
        self._text: EmbeddingText | None = None
        self._limits: MemoryLimits | None = None
        self._rows: OrderedDict[RequestKey, _Texts] = OrderedDict()  # the next in turn first
        self._alike = False
        # Seconds of a token by the length of its text, a class for each power of two: what short
        # texts take says little of long ones, in which each token looks at more others.
        self._token_s: dict[int, float] = {}
        self._most_tokens = CPU_PASS_TOKENS

    def load(self, report: ReportProgress) -> EngineFacts:
        """See `Engine.load`."""
        folder = find_folder(self._spec, report)
        with reading_ahead(folder.shards):
            backend, self._stream, self._limits = open_device(self._spec)
            self._load_model(folder, report)
        if backend != "cpu":
            self._most_tokens = PASS_TOKENS
        facts = self._find_facts(folder, backend)
        steps = LoadSteps(lambda share: report(LoadPhase.WARMUP, share), MATERIALISED)
        facts = self._probe(facts, steps)
        self._limits.set_wired()
        report(LoadPhase.WARMUP, 1.0)
        held = memory_warnings(self.bytes_held().active, self._spec.memory_limit_bytes)
        return replace(facts, warnings=(*facts.warnings, *held))

    def _load_model(self, folder: ModelFolder, report: ReportProgress) -> None:
        import mlx.core as mx

        with naming_what_is_missing():
            from .embedding_text import load_embedding_text
            from .loader import iterate_arrays, materialise
            from .pooled import load_pooled

        report(LoadPhase.WEIGHTS, IMPORTED)
        with mx.stream(self._stream):
            model = load_pooled(folder, self._pooling)
            weight_bytes = sum(array.nbytes for array in iterate_arrays(model))
            check_weights(folder.path, weight_bytes, self._spec.memory_limit_bytes)
            self._text = load_embedding_text(
                folder, self._pooling, model.dimensions, self._spec.context_length
            )
            model.answers = self._text.answers
            report(LoadPhase.WEIGHTS, WEIGHTS_FOUND)
            width = MATERIALISED - WEIGHTS_FOUND
            materialise(
                model,
                folder,
                lambda share: report(LoadPhase.MATERIALISE, WEIGHTS_FOUND + width * share),
            )
        self._model = model

    def _find_facts(self, folder: ModelFolder, backend: str) -> EngineFacts:
        assert self._text is not None
        assert self._model is not None
        versions = {name: version(name) for name in ("mlx", "mlx-lm")}
        ours = {"pooling": repr(self._pooling), "probe": PROBE_VERSION}
        return EngineFacts(
            context_length=self._text.limit,
            vocabulary_size=self._text.vocabulary_size,
            fingerprint=fingerprint(folder, versions | ours),
            backend=backend,
            versions=versions,
            warnings=(
                *find_context_length(folder.config, self._spec.context_length).warnings,
                *(() if self._spec.drafts == "off" else (NO_DRAFTS,)),
            ),
            cache_layers=pass_memory(self._model, folder.config, backend, self._text.limit),
            task=self._pooling.task,
            dimensions=self._model.dimensions,
        )

    def _probe(self, facts: EngineFacts, steps: Callable[[], None]) -> EngineFacts:
        """Return the facts with what a try of texts alone and together has shown.

        Raises:
            BadModelError: what it computes are no numbers, in 32-bit floats either, or it fails.
        """
        import mlx.core as mx

        from .loader import blaming_the_model

        assert self._model is not None
        with blaming_the_model(self._spec.path):
            with mx.stream(self._stream):
                differs = bool(self._model.answers) and self._model.answers_differ(
                    mx.array([[0, 1]])
                )
            distance = self._distance(facts, steps)
            is_half = self._model.is_half
            if distance is None and is_half:
                self._model.widen()
                distance = self._distance(facts, steps)
                warning = "in 16 bits its numbers overflow, so it computes in 32 bits"
                facts = replace(facts, warnings=(*facts.warnings, warning))
        if differs and distance is not None:
            raise BadModelError(
                f"{self._spec.path}: models of this type cannot be used for rankings: they change"
                " the numbers of their output layer"
            )
        if distance is None:
            raise BadModelError(
                f"{self._spec.path}: the model computes no numbers (NaN): its files are damaged"
            )
        exact = facts.backend == "cpu" and not is_half and not self._model.is_packed
        self._alike = distance > (EXACT if exact else HALF)
        if self._alike:
            reason = f"a text among others differs by {distance:.1g}"
            logger.info(log_line("texts of one length share a pass", reason=reason))
            facts = replace(facts, batching=Batching.ONE_ROW, batching_reason=reason)
        return facts

    def _distance(self, facts: EngineFacts, steps: Callable[[], None]) -> float | None:
        """Return how far texts among others are from the same texts alone; None: no numbers."""
        import numpy as np

        texts = [
            [(7 + 31 * at + 13 * length) % facts.vocabulary_size for at in range(length)]
            for length in PROBE_LENGTHS
            if length <= facts.context_length
        ] or [[0]]
        alone = []
        for text in texts:
            alone.append(self._compute([text], filled(len(text)))[0])
            steps()
        began, size = time.perf_counter(), filled(max(map(len, texts)))
        together = self._compute(texts, size)
        self._token_s = {size.bit_length(): (time.perf_counter() - began) / (size * len(texts))}
        steps()
        if not (np.isfinite(together).all() and all(np.isfinite(one).all() for one in alone)):
            return None
        largest = max(float(np.abs(one).max()) for one in alone) or 1.0
        return max(
            float(np.abs(a - b).max()) / largest for a, b in zip(alone, together, strict=True)
        )

    @property
    def text(self) -> TextCodec:
        """See `Engine.text`."""
        if self._text is None:
            raise RuntimeError("the engine is not loaded")
        return self._text

    def insert(self, row: Row) -> int:
        """See `Engine.insert`."""
        if row.key in self._rows or len(self._rows) >= self._spec.max_concurrency:
            raise RuntimeError(f"row {row.key} has no place among {len(self._rows)}")
        self._rows[row.key] = _Texts.of(row)
        return 0

    def remove(self, *keys: RequestKey) -> None:
        """See `Engine.remove`."""
        for key in keys:
            self._rows.pop(key, None)

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """See `Engine.set_aside`; nothing is kept, because nothing is computed in part."""
        self.remove(*keys)
        return [RowSetAside(key=key) for key in keys]

    def row_count(self) -> int:
        """See `Engine.row_count`."""
        return len(self._rows)

    def predict_step_s(self) -> float:
        """See `Engine.predict_step_s`."""
        size = self._longest_left()
        token_s, growth = self._pace(size)
        return CAUTION * token_s * growth * max(self._budget(), size)

    def _longest_left(self) -> int:
        """Return the length that the longest text is filled up to."""
        return filled(max((texts.left[-1][0] for texts in self._rows.values()), default=0))

    def _pace(self, size: int) -> tuple[float, float]:
        """Return what is known of texts of this length.

        Returns:
            The seconds of a token, by such texts or the next shorter ones that were timed; 0: none
            was. And how many times as long a token of this length may take.
        """
        wanted = size.bit_length()
        shorter = [known for known in self._token_s if known <= wanted]
        nearest = max(shorter) if shorter else min(self._token_s, default=wanted)
        growth = size / 2.0 ** (nearest - 1) if nearest < wanted else 1.0
        return self._token_s.get(nearest, 0.0), min(growth, MOST_GROWTH)

    def has_long_prompt(self) -> bool:
        """See `Engine.has_long_prompt`."""
        left = sum(length for texts in self._rows.values() for length, _ in texts.left)
        return left > self._budget() or any(texts.has_begun for texts in self._rows.values())

    def _budget(self) -> int:
        """Return the tokens of a pass that does not hold up others for longer than it should."""
        token_s, _ = self._pace(self._longest_left())
        if not token_s:
            return FIRST_PASS_TOKENS
        target_s = self._spec.decode_stall_target_ms / 1000
        return int(min(self._most_tokens, max(LEAST_PASS_TOKENS, target_s / token_s)))

    def step(self) -> StepResult:
        """See `Engine.step`: one pass."""
        from .loader import judging_errors

        return judging_errors(self._step)()

    def _step(self) -> StepResult:
        import numpy as np

        began = time.perf_counter()
        items = plan_pass(list(self._rows.values()), self._budget(), alike=self._alike)
        size = filled(max(item.length for item in items))
        found = self._compute([one.texts.tokens(one.number) for one in items], size)
        is_number = np.isfinite(found).all(axis=1)
        tokens, computed = [], dict.fromkeys(dict.fromkeys(one.texts.row.key for one in items), 0)
        for item, vector, is_right in zip(items, found, is_number, strict=True):
            row = item.texts.row
            item.texts.done += item.length
            item.texts.has_begun = True
            computed[row.key] += item.length
            packed = self._packed(vector, row.dimensions) if is_right else b""
            tokens.append(RowToken(key=row.key, token=item.number, vector=packed))
        prefill = [
            RowPrefill(
                key=key,
                done=self._rows[key].done,
                total=len(self._rows[key].row.tokens),
                computed=n,
            )
            for key, n in computed.items()
        ]
        last = {token.key: token for token in tokens}
        for key in computed:
            if self._rows[key].left:
                self._rows.move_to_end(key)
            else:
                del self._rows[key]
                last[key].finish = FinishReason.STOP
        took_s = time.perf_counter() - began
        token_s, kind = took_s / (size * len(items)), size.bit_length()
        before_s = self._token_s.get(kind, token_s)
        self._token_s[kind] = before_s + SMOOTHING * (token_s - before_s)
        return StepResult(tokens=tokens, prefill=prefill, took_s=took_s)

    def _compute(self, texts: Sequence[Sequence[int]], size: int) -> Any:
        """Return the vectors of texts as an array of numpy, (texts, width), not normalised."""
        import mlx.core as mx
        import numpy as np

        assert self._model is not None
        assert self._text is not None
        ids = np.zeros((len(texts), size), dtype=np.int32)
        for number, text in enumerate(texts):
            ids[number, : len(text)] = text
        with mx.stream(self._stream):
            lengths = mx.array([len(text) for text in texts], dtype=mx.int32)
            of_kind = self._text.kinds(ids)
            vectors = self._model(
                mx.array(ids), lengths, None if of_kind is None else mx.array(of_kind)
            )
            mx.eval(vectors)
        return np.array(vectors)

    def _packed(self, vector: Any, dimensions: int) -> bytes:
        """Return a vector as it travels: its first numbers, and of length 1 if that is so."""
        import numpy as np

        kept = vector[: dimensions or None]
        if self._pooling.normalises or (dimensions and self._pooling.task is Task.EMBED):
            kept = kept / max(float(np.linalg.norm(kept.astype(np.float64))), 1e-12)
        packed: bytes = kept.astype("<f4").tobytes()
        return packed

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """See `Engine.give_back`."""
        import mlx.core as mx

        mx.clear_cache()

    def bytes_held(self) -> EngineBytes:
        """See `Engine.bytes_held`."""
        if self._limits is None:
            return EngineBytes()
        from .limits import bytes_held

        return bytes_held(0, 0)

    def close(self) -> None:
        """See `Engine.close`."""
        limits, self._limits = self._limits, None
        self._rows.clear()
        self._model = None
        if limits is not None:
            import mlx.core as mx

            limits.restore()
            mx.clear_cache()


def pass_memory(
    model: PooledModel, config: Mapping[str, Any], backend: str, limit: int
) -> tuple[CacheLayers, ...]:
    """Return what a pass takes, as if it were the cache of a row.

    Nothing is kept between texts. While a pass runs, each token has vectors of several widths, and
    on a CPU each pair of tokens of a text, of which some are read at once, a score for each head;
    keys and values are there of all that was read before of the same texts.

    Args:
        model: not computed.
        config: of the model.
        backend: of MLX.
        limit: tokens of a text, at most.
    """
    from .caches import row_bytes
    from .encoders import BLOCK

    tokens = CPU_PASS_TOKENS if backend == "cpu" else PASS_TOKENS
    longest = max(tokens, limit)
    held = row_bytes(model.cache_layers(), longest) if limit > BLOCK else 0
    if backend == "cpu":
        heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
        held += 2 * 4 * heads * min(BLOCK, limit) * longest
    width = int(config.get("hidden_size") or config.get("n_embd") or 0)
    inner = int(config.get("intermediate_size") or config.get("n_inner") or 4 * width)
    held += 4 * (8 * width + 3 * inner) * (longest if model.reads_whole else tokens)
    return (CacheLayers(layers=1, token_bytes=0, row_bytes=held // 2),)
