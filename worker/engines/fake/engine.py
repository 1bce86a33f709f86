"""An engine without a model: deterministic answers, and faults on demand.

`engine = "fake"` in a model's entry tries mlxsup without a model; the tests rely on it. Token n of
an answer is a pure function of the prompt's tokens, of n, of the option `voice`, of the name of its
adapter, and of the seed if temperature is above 0 (`fake_text.answer_token`), but one of the
request's `stop_token_ids`, drawn before `min_tokens`, becomes the next id that is not one. An
answer ends with `length` at max_tokens unless a directive or the option `answer_tokens`, as a
model's end of text would, ends it earlier.

Options (a map in the launch spec): see `fake_options.FakeOptions`.

Directives may be anywhere in a prompt (text, chat or tokens):

    [[answer 12]]                       end with `stop` after 12 tokens (0: without any)
    [[say hello]]                       answer exactly this, then `stop`
    [[fault crash=SIGKILL at=5]]        die by a signal when token 5 is due; SIGSTOP stops
    [[fault crash=exit:70 at=5]]        die with an exit code
    [[fault raise at=3]]                an exception out of `step`
    [[fault stall=sleep at=4]]          a step that never ends: sleep, busy (Python), gil (held)
    [[fault stall=sleep during=insert]] the same outside a step: insert, remove, bytes_held
    [[fault frames=garbage at=2]]       send the supervisor no valid message; also oversized
    [[fault link=drop at=2]]            close the connection to the supervisor, and stay alive
    [[fault beats=end at=2]]            end the thread that sends heartbeats
    [[fault row=lost at=2]]             forget the row without a word
    [[fault token=other at=2]]          answer with another token
    [[fault big=100000]]                every token is shown as that many letters
    [[fault slow=0.05]]                 every step of this row takes that much longer
    [[tokenize raise]]                  the template raises; also loop, slow=2.5

`at` counts tokens from 1; 0 means during the prefill. With `generation=1` a fault only strikes in
that life of the worker, so that the next one can be seen to continue; with `rank=1` in that rank of
a group alone, not in rank 0, which is the worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from mlxsup.protocol.codec import MAX_FRAME_BYTES
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.version import VERSION

from ...engine import (
    BadModelError,
    Engine,
    EngineBytes,
    EngineFacts,
    ModelFiles,
    ModelMissingError,
    NoDeviceError,
    Rank,
    ReportProgress,
    Row,
    RowPrefill,
    RowSetAside,
    RowToken,
    StepResult,
)
from .options import (
    FakeOptions,
    crash,
    stall,
    start_child,
)
from .ring import FakeRing
from .text import (
    BIG_TOKEN_BASE,
    VOCABULARY_SIZE,
    Directives,
    FakeTextCodec,
    answer_token,
    decode_tokens,
    encode_text,
    prompt_digest,
    text_vector,
    token_logprobs,
)

GARBAGE = [b"\xc1not a message"]

FAKE_DIMENSIONS = 16
"""Of an embedding: one for each byte of a digest."""

MAX_KEPT = 1024
"""How many rows that were taken out may return: their prefill is remembered, as with MLX."""

BYTES_PER_KEPT_TOKEN = 1024
"""How much memory a row that was set aside claims to take."""


class FakeStepError(Exception):
    """What a step raises on demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What faults of a worker need besides the engine.

    Attributes:
        send_frames: sends the supervisor frames as they are.
        drop_link: closes the connection to the supervisor for good.
        end_beats: ends the heartbeats.
    """

    send_frames: Callable[[list[bytes]], None]
    drop_link: Callable[[], None]
    end_beats: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class FakeRow:
    """A row, and how far it has come.

    Attributes:
        row: what was asked for.
        directives: what its prompt asks of the engine.
        digest: of its prompt and the model.
        said: the tokens that it must answer with; empty: any.
        known: how many of those were known before it came.
        prefilled: how many tokens of the prompt, and of what was delivered, have been read.
        generated: how many tokens the answer has.
        answered: the numbers of the texts that have a vector.
    """

    row: Row
    directives: Directives
    digest: bytes
    said: list[int]
    known: int = 0
    prefilled: int = 0
    generated: int = 0
    answered: list[int] = field(default_factory=list)

    @property
    def to_prefill(self) -> int:
        """Return the number of tokens that are read before the next one of the answer."""
        return len(self.row.tokens) + len(self.row.delivered)

    @property
    def computed(self) -> int:
        """Return the number of tokens of prompt and answer that have been read or generated."""
        return self.prefilled + self.generated - len(self.row.delivered)

    @property
    def is_decoding(self) -> bool:
        """True if everything has been read."""
        return self.prefilled == self.to_prefill

    @property
    def is_read(self) -> bool:
        """True if at most the last token is left, which gives the first one of the answer."""
        return self.prefilled >= self.to_prefill - 1

    @property
    def seed(self) -> int | None:
        """Return the seed that its tokens are drawn with; None for a greedy answer."""
        return self.row.seed if self.row.sampling.temperature > 0 else None

    def draw(self, index: int) -> int:
        """Return the token of this number, from 0."""
        if self.directives.big:
            return BIG_TOKEN_BASE + self.directives.big
        if index < len(self.said):
            return self.said[index]
        return answer_token(self.digest, index, self.seed)


def identify_fake(spec: LaunchSpec) -> ModelFiles:
    """Return what all ranks must have alike; the weights take the option `active_bytes`."""
    return ModelFiles(
        fingerprint=f"fake {spec.fake}",
        versions={"mlxsup": VERSION},
        weight_bytes=spec.fake.get("active_bytes", 0),
    )


class FakeEngine(Engine):
    """See `Engine`.

    Args:
        spec: options in `fake`; `max_concurrency` is held to.
        reach: for the faults that are not the engine's own; without it they do nothing.
        rank: its place in a group, whose ranks then wait for each other in each step.

    Raises:
        FakeOptionError: an option is unknown or wrong.
    """

    def __init__(
        self, spec: LaunchSpec, reach: Reach | None = None, rank: Rank | None = None
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._ring: FakeRing | None = None
        self._options = FakeOptions.from_map(spec.fake)
        self._reach = reach
        self._task = Task(self._options.task)
        self._codec = FakeTextCodec(
            self._options.tokenize_s,
            self._task,
            self._options.context_length,
            takes_pictures=self._options.takes_pictures,
        )
        self._rows: dict[RequestKey, FakeRow] = {}
        self._kept: dict[RequestKey, int] = {}  # tokens computed; MAX_KEPT of them
        self._aside: dict[RequestKey, int] = {}  # the same, of rows that will return
        self._is_closed = False

    @property
    def text(self) -> FakeTextCodec:
        """See `Engine.text`."""
        return self._codec

    def load(self, report: ReportProgress) -> EngineFacts:
        """See `Engine.load`; fails as the options say."""
        options = self._options
        if self._rank is not None:
            self._ring = FakeRing(self._rank)
        count = options.load_steps
        for _ in range(options.children):
            start_child()
        phases = (LoadPhase.WEIGHTS, LoadPhase.MATERIALISE, LoadPhase.WARMUP)
        for index in range(count):
            if index == count // 2:
                self._fail_in_load()
            time.sleep(options.load_s / count)
            report(phases[index * len(phases) // count], (index + 1) / count)
        if self._ring is not None:
            self._ring.meet()
        limits = [n for n in (options.context_length, self._spec.context_length) if n]
        fingerprint = f"fake-{options.answer_tokens}{options.voice and '-'}{options.voice}"
        batching, reason = self._find_batching(fingerprint)
        return EngineFacts(
            context_length=min(limits),
            vocabulary_size=VOCABULARY_SIZE,
            fingerprint=fingerprint,
            backend="fake",
            batching=batching,
            batching_reason=reason,
            warnings=(options.warning,) if options.warning else (),
            cache_layers=options.cache_layers,
            task=self._task,
            takes_pictures=options.takes_pictures,
            dimensions=FAKE_DIMENSIONS if self._task is Task.EMBED else 0,
            adapters={n: f"{fingerprint}+{n}={path}" for n, path in self._spec.adapters.items()},
        )

    def _find_batching(self, fingerprint: str) -> tuple[Batching, str]:
        """Return how rows may be batched and why: as an earlier life found out, or as the options
        say."""
        known = self._spec.known_batching
        if known is not None and known["fingerprint"] == fingerprint:
            return Batching(known["batching"]), known["reason"]
        batching = Batching(self._options.batching)
        if batching is Batching.TOGETHER:
            return batching, ""
        return batching, f"an option asks for it in life {self._spec.generation}"

    def _fail_in_load(self) -> None:
        options, path = self._options, self._spec.path
        if 0 < options.load_fault_generations < self._spec.generation:
            return
        if options.crash_in_load:
            crash(options.crash_in_load)
        if options.load_stall:
            stall(options.load_stall)
        match options.load_error:
            case "missing":
                raise ModelMissingError(f"the model folder {path} does not exist")
            case "bad":
                raise BadModelError(f"{path}/config.json is not a model's configuration")
            case "memory":
                raise MemoryError("the weights do not fit into memory")
            case "device":
                raise NoDeviceError("there is no usable device")
            case "exception":
                raise RuntimeError(f"life {self._spec.generation} raises this on demand")

    def insert(self, row: Row) -> int:
        """See `Engine.insert`."""
        if len(self._rows) >= self._spec.max_concurrency or row.key in self._rows:
            raise RuntimeError(f"row {row.key} has no place among {len(self._rows)}")
        directives = Directives.parse(decode_tokens(row.tokens))
        said = encode_text(directives.say)
        digest = prompt_digest(row.tokens, self._options.voice + row.adapter)
        known = max(self._kept.pop(row.key, 0), self._aside.pop(row.key, 0))
        if row.prompt_logprobs is not None:
            known = 0
        cached = min(known, len(row.tokens) + len(row.delivered) - 1)
        self._rows[row.key] = FakeRow(
            row=row,
            directives=directives,
            digest=digest,
            said=said,
            known=cached,
            prefilled=cached,
            generated=len(row.delivered),
        )
        self._stall_when_due(self._rows[row.key], "insert")
        return cached

    def remove(self, *keys: RequestKey) -> None:
        """See `Engine.remove`."""
        for key in keys:
            row = self._rows.pop(key, None)
            if row is None:
                continue
            self._kept[key] = row.computed
            while len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._stall_when_due(row, "remove")

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """See `Engine.set_aside`; no token is computed ahead here."""
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        self.remove(*keys)
        if keep:
            self._aside |= {
                key: row.computed
                for key, row in rows.items()
                if row.computed and (row.row.prompt_logprobs is None or row.is_decoding)
            }
        else:
            self.drop_kept(*keys)
        return [RowSetAside(key=key, is_kept=key in self._aside) for key in keys]

    def drop_kept(self, *keys: RequestKey) -> None:
        """See `Engine.drop_kept`."""
        for key in keys:
            self._aside.pop(key, None)

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        """See `Engine.free_kept`."""
        self.drop_kept(*(key for key in list(self._aside) if key != spared))

    def row_count(self) -> int:
        """See `Engine.row_count`."""
        return len(self._rows)

    def predict_step_s(self) -> float:
        """See `Engine.predict_step_s`."""
        return self._options.step_s if self._options.predicted_s < 0 else self._options.predicted_s

    def has_long_prompt(self) -> bool:
        """See `Engine.has_long_prompt`."""
        chunk = self._options.prefill_tokens_per_step
        return any(
            not row.is_decoding
            and (row.to_prefill - row.prefilled > chunk or row.prefilled > row.known)
            for row in self._rows.values()
        )

    def has_decoding(self) -> bool:
        """See `Engine.has_decoding`."""
        return any(row.is_decoding for row in self._rows.values())

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._options.pass_s

    def step(self) -> StepResult:
        """See `Engine.step`: a token for each row that decodes, a chunk of one prompt, or
        with the option `pass_s` of each, and the last token of all that were read before it, which
        join those that decode, as with MLX.

        It says that it took as long as the options and directives say, whatever a clock says; if
        rows decode while a prompt is read, half of that is theirs.
        """
        waiting = [row for row in self._rows.values() if not row.is_decoding]
        if self._options.pass_s:
            return self._run(waiting)
        read = [row for row in waiting if row.is_read]
        return self._run([*read, *[row for row in waiting if not row.is_read][:1]])

    def decode(self) -> StepResult:
        """See `Engine.decode`."""
        return self._run([])

    def _run(self, prefilling: Sequence[FakeRow]) -> StepResult:
        if self._ring is not None:
            self._ring.meet()
        tokens: list[RowToken] = []
        prefill: list[RowPrefill] = []
        step_s = self._options.step_s + self._options.pass_s * bool(prefilling)
        step_s += sum(r.directives.slow for r in self._rows.values())
        if step_s > 0:
            time.sleep(step_s)
        decoding = [row for row in self._rows.values() if row.is_decoding]
        for row in prefilling:
            prefill.append(self._prefill(row))
            if row.is_decoding:
                decoding.append(row)
        for row in decoding:
            token = self._decode(row)
            if row.row.key not in self._rows:
                continue  # lost on demand
            tokens.append(token)
            if token.finish is not None:
                del self._rows[token.key]
        decode_s = step_s / 2 if tokens and prefill else step_s if tokens else 0.0
        return StepResult(tokens=tokens, prefill=prefill, took_s=step_s, decode_s=decode_s)

    def _prefill(self, row: FakeRow) -> RowPrefill:
        self._fail_when_due(row, 0)
        total = row.to_prefill
        computed = min(total - row.prefilled, self._options.prefill_tokens_per_step)
        begin, row.prefilled = row.prefilled, row.prefilled + computed
        told = row.row.tokens[begin + 1 : row.prefilled + 1]
        return RowPrefill(
            key=row.row.key,
            done=row.prefilled,
            total=total,
            computed=computed,
            logprobs=[
                one for token in told if (one := token_logprobs(token, row.row.prompt_logprobs))
            ],
        )

    def _decode(self, row: FakeRow) -> RowToken:
        self._fail_when_due(row, row.generated + 1)
        key, index = row.row.key, row.generated
        if row.row.lengths:
            return self._vector(row)
        if not row.row.max_tokens:
            return RowToken(key=key, token=None, finish=FinishReason.LENGTH)
        may_end = index >= row.row.min_tokens
        if may_end and not row.row.ignore_eos and index >= self._answer_length(row):
            return RowToken(key=key, token=None, finish=FinishReason.STOP)
        token = row.draw(index)
        if (
            row.directives.token
            and index + 1 == row.directives.at
            and self._is_struck(row.directives)
        ):
            token += 1
        if token in row.row.stop_token_ids:
            if may_end:
                return RowToken(key=key, token=None, finish=FinishReason.STOP, ended_by=token)
            while token in row.row.stop_token_ids:
                token = (token + 1) % VOCABULARY_SIZE
        row.generated += 1
        finish = FinishReason.LENGTH if row.generated >= row.row.max_tokens else None
        logprobs = token_logprobs(token, row.row.top_logprobs)
        return RowToken(key=key, token=token, finish=finish, logprobs=logprobs)

    def _vector(self, row: FakeRow) -> RowToken:
        """Compute the vector of the first text without one."""
        asked = row.row
        done = {*asked.delivered, *row.answered}
        number = next(one for one in range(len(asked.lengths)) if one not in done)
        begin = sum(asked.lengths[:number])
        tokens = asked.tokens[begin : begin + asked.lengths[number]]
        row.answered.append(number)
        row.generated += 1
        return RowToken(
            key=asked.key,
            token=number,
            vector=text_vector(tokens, self._options.voice, self._task, asked.dimensions),
            finish=FinishReason.STOP if row.generated == len(asked.lengths) else None,
        )

    def _answer_length(self, row: FakeRow) -> float:
        if row.said:
            return len(row.said)
        if row.directives.answer is not None:
            return row.directives.answer
        return self._options.answer_tokens or float("inf")

    def _fail_when_due(self, row: FakeRow, token_number: int) -> None:
        wanted = row.directives
        if wanted.at != token_number or not self._is_struck(wanted):
            return
        if wanted.crash:
            crash(wanted.crash)
        if wanted.stall and wanted.during == "step":
            stall(wanted.stall)
        if self._reach is not None:
            self._fail_beside(wanted, self._reach)
        if wanted.row:
            del self._rows[row.row.key]
        if wanted.exception:
            self._raise()

    @staticmethod
    def _fail_beside(wanted: Directives, reach: Reach) -> None:
        if wanted.frames:
            is_oversized = wanted.frames == "oversized"
            reach.send_frames([bytes(MAX_FRAME_BYTES + 1)] if is_oversized else GARBAGE)
        if wanted.link:
            reach.drop_link()
        if wanted.beats:
            reach.end_beats()

    def _stall_when_due(self, row: FakeRow, method: str) -> None:
        wanted = row.directives
        if wanted.stall and wanted.during == method and self._is_struck(wanted):
            stall(wanted.stall)

    def _is_struck(self, wanted: Directives) -> bool:
        rank = 0 if self._rank is None else self._rank.number
        return wanted.rank == rank and wanted.generation in (0, self._spec.generation)

    @staticmethod
    def _raise() -> NoReturn:
        raise FakeStepError("the step raised this on demand")

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """See `Engine.give_back`."""
        if not keeps_prefixes:
            self._kept.clear()

    def bytes_held(self) -> EngineBytes:
        """See `Engine.bytes_held`."""
        for row in self._rows.values():
            if row.generated >= row.directives.at:
                self._stall_when_due(row, "bytes_held")
        options = self._options
        kept = (options.token_bytes or BYTES_PER_KEPT_TOKEN) * sum(self._aside.values())
        lengths = [row.computed for row in self._rows.values()]
        padded = options.token_bytes * len(lengths) * max(lengths, default=0)
        active, cache = options.active_bytes + padded + kept, options.cache_bytes * bool(self._kept)
        return EngineBytes(active=active, cache=cache, peak=active, kept=kept)

    def close(self) -> None:
        """See `Engine.close`.

        Raises:
            RuntimeError: it was closed before.
        """
        if self._is_closed:
            raise RuntimeError("the engine was closed twice")
        self._is_closed = True
        if self._ring is not None:
            self._ring.close()
        self._rows.clear()
        self._aside.clear()
