"""The seam between the step loop and what turns steps into tokens.

One thread, the process's main thread, calls everything here except `TextCodec.encode`, which runs
on the helper threads and never touches MLX. Everything in `engines/` implements it, and one
contract suite (tests/contract) checks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import Batching, FinishReason, LoadPhase
from mlxsup.protocol.tasks import Task

from .text.channels import ChannelRules
from .text.grammar import RowGrammar, StrictSchemas

ReportProgress = Callable[[LoadPhase, float], None]
"""Called during a load with the phase and the progress over all phases, from 0 to 1."""


class ModelMissingError(Exception):
    """The model's folder or one of its files is missing; the message names it (exit 66)."""


class BadModelError(Exception):
    """The model's files cannot be used; the message names the file (exit 65)."""


class BadLaunchError(Exception):
    """The model's entry asks for something impossible; the message names the key (exit 64)."""


class NoDeviceError(Exception):
    """MLX has no usable device here (exit 69)."""


class WorkerFaultError(Exception):
    """This process has lost one of its threads or rows; the message says which (exit 71).

    It says nothing about the requests: another process serves them.
    """


class DivergedError(Exception):
    """The ranks of a group do not compute the same, or together something else than one of them
    would; the message says what (exit 70)."""


class GpuFaultElsewhereError(Exception):
    """The GPU gave up this process's work because of another process's fault (exit 72)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The place of a process among those that serve one model together.

    Attributes:
        number: 0 for the leader, which is the worker.
        addresses: where each rank listens, `ip:port`, by number.
        backend: MLX's way of connecting them, `ring` or `nccl`.
    """

    number: int
    addresses: tuple[str, ...]
    backend: str = "ring"

    @property
    def size(self) -> int:
        """Return how many ranks there are."""
        return len(self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The facts about files that all hosts of a group must share, known before any import.

    Attributes:
        fingerprint: of the model's files.
        versions: of mlxsup and of the engine's libraries.
        weight_bytes: of the whole model.
    """

    fingerprint: str
    versions: dict[str, str]
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a load found out.

    Attributes:
        context_length: tokens of prompt and answer together, at most.
        vocabulary_size: valid token ids are below it.
        fingerprint: changes when the same request might give another answer.
        backend: `cpu`, `cuda`, `metal` or `fake`.
        versions: those of mlx and mlx-lm.
        batching: how many rows a pass computes without changing an answer.
        batching_reason: why it is not `together`; empty if it is.
        warnings: what users should know about this model, a sentence each.
        answer_warnings: those that each answer repeats, as it may be worth nothing.
        prefix_cache_bytes: memory for the prefixes of earlier prompts, to be reused.
        prefix_cache_tokens: the longest prompt that is kept whole.
        cache_layers: what the layers keep for each row.
        sampling: how the model's makers sample, for requests that do not say.
        task: what the model is for.
        dimensions: of its embeddings; 0 for a model without any.
        takes_pictures: true if messages may have pictures.
        adapters: the fingerprint of each by its name, in the order of the configuration.
        draft_tokens: how many tokens a row guesses at once, at most; 0: rows do not guess.
        parallel: how several hosts divide the model, `tensor` or `pipeline`; empty: they do not.
    """

    context_length: int
    vocabulary_size: int
    fingerprint: str
    backend: str
    versions: dict[str, str] = field(default_factory=dict)
    batching: Batching = Batching.TOGETHER
    batching_reason: str = ""
    warnings: tuple[str, ...] = ()
    answer_warnings: tuple[str, ...] = ()
    prefix_cache_bytes: int = 0
    prefix_cache_tokens: int = 0
    cache_layers: tuple[CacheLayers, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    task: Task = Task.GENERATE
    dimensions: int = 0
    takes_pictures: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft_tokens: int = 0
    parallel: str = ""

    def fingerprint_of(self, adapter: str) -> str | None:
        """Return the fingerprint of rows with an adapter, or with none (empty); None if it is not
        there."""
        return self.adapters.get(adapter) if adapter else self.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """A picture in a prompt, as the model's tower takes it; no array of MLX.

    Attributes:
        begin: the place of its first token in the prompt.
        tokens: the ids that stand for it.
        digest: SHA-256 of its file.
        arrays: what the processor made of it, by the name that the model gives it.
    """

    begin: int
    tokens: tuple[int, ...]
    digest: bytes
    arrays: Mapping[str, Any]

    @property
    def end(self) -> int:
        """Return the place behind its last token."""
        return self.begin + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenised prompt: plain lists, ready to cross a thread.

    Attributes:
        tokens: at least one id.
        opening: the end of the prompt that opened the answer, which decides which part the first
            generated token belongs to: `<think>`, for example, or a header without its end.
        grammar: the grammar that the answer must follow; None: any text.
        strict: the schemas that the arguments of its calls must match; None: they need not, or
            cannot be checked.
        checkpoints: how many of the first tokens another prompt is likely to share (the system
            prompt, the messages without the answer's opening), ascending, each less than the
            number of tokens.
        warnings: what was changed in the messages, a sentence each.
        text: what the client is shown of it, if it asks for that.
        lengths: of texts that are embedded or ranked, how many of the tokens each has, in order;
            empty for a prompt that is answered with text.
        pictures: those that tokens stand for, in order.
    """

    tokens: list[int]
    opening: str = ""
    grammar: RowGrammar | None = None
    strict: StrictSchemas | None = None
    checkpoints: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    text: str | None = None
    lengths: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request as the engine takes it: checked, tokenised, every default filled in.

    The parameters are those of `protocol.body.RequestBody`, in the ranges of
    `protocol.parameters`; whatever they are, a step must not raise an error because of them (C7).

    Attributes:
        key: the request this belongs to.
        tokens: the prompt's ids.
        max_tokens: at least 1, or 0 with `prompt_logprobs`: the row then ends without a token once
            its prompt was read. Prompt and answer fit into the context.
        min_tokens: no token that ends the answer is drawn before it has this many, including those
            that were delivered; at most `max_tokens`.
        sampling: how its tokens are picked.
        seed: token n is drawn with a key derived from (seed, n).
        delivered: ids of the answer that an earlier life of the worker already produced; the
            engine continues with token number `len(delivered)`. Fewer than `max_tokens`, which
            counts them.
        logit_bias: added to the logits, by token id, each below the vocabulary's size.
        stop_token_ids: end the answer as end-of-text tokens do; each below the vocabulary's size.
        ignore_eos: whether the model's own end-of-text tokens are tokens like any other.
        top_logprobs: how many of the likeliest tokens to report with each token; None: none, and
            not the token itself either.
        prompt_logprobs: the same with each token of the prompt but the first; all of it is then
            read, whatever is known of it.
        grammar: the grammar that the answer must follow, after what was delivered; None: any text.
        checkpoints: see `Prompt.checkpoints`.
        lengths: see `Prompt.lengths`. Such a row is given a vector for each of its texts, in any
            order, under the number of the text instead of a token; `max_tokens` is how many there
            are, and `delivered` has the numbers of those that are not computed again.
        dimensions: of each vector; 0: all that the model has.
        pictures: see `Prompt.pictures`.
        adapter: one of the model's adapters; empty: the model itself.
    """

    key: RequestKey
    tokens: list[int]
    max_tokens: int
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    delivered: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: RowGrammar | None = None
    checkpoints: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    dimensions: int = 0
    pictures: tuple[Picture, ...] = ()
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """How likely a row's token was.

    Attributes:
        logprob: the token's log-probability.
        top: ids of the likeliest tokens and their log-probabilities, the likeliest first.
    """

    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RowToken:
    """One token of one row; not frozen: one is made for every token.

    Attributes:
        key: the request this belongs to.
        token: the id; None for a row that ended without another one (an end-of-text token, or one
            of the row's `stop_token_ids`).
        finish: `stop` or `length` on the last one; the row has then left the batch.
        logprobs: set if the row asked for them and there is a token.
        ended_by: the id that ended the answer, if one did.
        vector: of the text that `token` is the number of, packed by `pooling.pack_vector`; empty if
            not all of it are numbers, which ends the row.
    """

    key: RequestKey
    token: int | None
    finish: FinishReason | None = None
    logprobs: RowLogprobs | None = None
    ended_by: int | None = None
    vector: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetAside:
    """A row that was taken out for a pause.

    Attributes:
        key: the request this belongs to.
        token: one that was computed already and that no step has returned; its `finish` says that
            the answer has ended, and nothing is kept then.
        is_kept: whether the engine keeps what it has computed for the row: all tokens but the last.
    """

    key: RequestKey
    token: RowToken | None = None
    is_kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrefill:
    """How many tokens of a row's prompt, and of what was delivered, have been processed.

    Attributes:
        key: the request this belongs to.
        done: tokens processed, those known from earlier rows included.
        total: tokens to process.
        computed: tokens that this step computed; the first pass over the last one counts here,
            even if it is the one that draws the first token.
        known: how many of its tokens need no prefill, if that has changed since `insert`.
        logprobs: of the next tokens of the prompt, the second one first, as far as this step tells
            them, if the row asked for them.
    """

    key: RequestKey
    done: int
    total: int
    computed: int = 0
    known: int | None = None
    logprobs: Sequence[RowLogprobs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessed:
    """What a pass has made of a row's guesses.

    Attributes:
        read: how many there were.
        accepted: how many of them are tokens of the answer.
    """

    read: int
    accepted: int


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What one step produced, and how long it took; not frozen, because each step makes one.

    Attributes:
        tokens: one for each decoding row, more if guesses of it were right, in their order, or one
            for each text that was read.
        prefill: one chunk.
        took_s: seconds that the engine worked, without any in which this process was stopped.
        decode_s: how many of them went to the decoding rows, as predicted from steps without
            prefill; 0 if none decodes.
        is_new_shape: whether it was the first of its shape, and the device compiled or planned
            something for it.
        guessed: by row, if it has read guesses of any.
    """

    tokens: list[RowToken] = field(default_factory=list)
    prefill: list[RowPrefill] = field(default_factory=list)
    took_s: float = 0.0
    decode_s: float = 0.0
    is_new_shape: bool = False
    guessed: Mapping[RequestKey, Guessed] | None = None


@dataclass(slots=True, kw_only=True)
class EngineBytes:
    """Memory, in bytes: held by arrays, kept by the allocator for reuse, the most ever held; of the
    first, `kept` belongs to rows that were set aside, and `prefix` to those that have ended, their
    pictures included. Not frozen, because each step makes some."""

    active: int = 0
    cache: int = 0
    peak: int = 0
    kept: int = 0
    prefix: int = 0


class Detokenizer(Protocol):
    """Turns the token ids of one answer into text, never showing half a character."""

    def add(self, token: int) -> str:
        """Add a token; return the text that became certain with it, which may be empty."""

    def finish(self) -> str:
        """Return the text that was still held back, when the answer is over."""


class TextCodec(Protocol):
    """Templates and tokenisation; touches no MLX object.

    One thread may encode with it next to the owner thread; another one needs a `twin`.
    """

    def twin(self) -> TextCodec:
        """Make a codec for another thread, on that thread; it shares nothing that changes."""

    @property
    def channel_rules(self) -> ChannelRules:
        """Return the rules by which the model marks the parts of its answers."""

    def encode(self, body: RequestBody) -> Prompt:
        """Encode the prompt of a request; runs on a helper thread.

        Raises:
            RemoteError: `invalid_request`, the request's own fault (a template error, no template,
                ids outside the vocabulary, a prompt of no tokens).
        """

    def encode_texts(self, body: PoolingBody) -> Prompt:
        """Encode the texts of a request that are embedded or ranked; runs on a helper thread.

        Raises:
            RemoteError: `invalid_request`, the request's own fault, or the model does not do that;
                `context_length_exceeded`.
        """

    def prompt_text(self, body: RequestBody, tokens: Sequence[int]) -> str:
        """Return the text of a prompt as it was given, or else that of its tokens; runs on a helper
        thread."""

    def constrain(self, body: RequestBody, prompt: Prompt) -> Prompt:
        """Return the prompt with the grammar that its answer must follow, if one can be made; runs
        on a helper thread.

        Raises:
            RemoteError: `invalid_request`; no answer can follow it.
        """
        return prompt

    def detokenizer(self) -> Detokenizer:
        """Make a detokenizer for one answer."""

    def token_alone(self, token: int) -> tuple[str, bytes]:
        """See `TokenLogprob`: its `text` and `raw_bytes`."""


class Engine(Protocol):
    """One model in one process; its methods belong to the thread that called `load`.

    What is defined here is so of an engine that keeps nothing of rows, and has nothing to prepare.
    """

    def load(self, report: ReportProgress) -> EngineFacts:
        """Loads, materialises every array, builds the batch and warms it up, leaving no row.

        Raises:
            ModelMissingError, BadModelError, BadLaunchError, NoDeviceError: permanent.
            MemoryError: not enough memory now.
        """

    @property
    def text(self) -> TextCodec:
        """Return the model's text side; available after `load`."""

    def insert(self, row: Row) -> int:
        """Adds a row; its prefill starts with the next step. Never more than `max_concurrency`.

        Returns:
            How many of its tokens need no prefill, because they are known from earlier rows.
        """

    def remove(self, *keys: RequestKey) -> None:
        """Takes rows out at once, in prefill or decode; unknown keys are ignored.

        Rows that leave together cost one change of the batch, not one each.
        """

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """Takes rows out at once for a pause; `insert` of the same key continues them.

        Args:
            keys: of rows, or of rows that were set aside before and have not returned; others are
                not kept.
            keep: whether to keep what was computed, until the row returns or is dropped.

        Returns:
            One for each key, in this order.
        """

    def drop_kept(self, *keys: RequestKey) -> None:
        """Frees what is kept of rows that do not return; unknown keys are ignored."""
        return

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        """Frees what is kept of rows that were set aside, because memory is short: they may still
        return, and are read again then.

        Args:
            spared: the state of this request stays.
        """
        return

    def row_count(self) -> int:
        """Return the number of rows in prefill or decode; without any, a step would do nothing."""

    def predict_step_s(self) -> float:
        """Return the seconds that the next step should take at most, from measurements; 0 if
        unknown."""

    def has_long_prompt(self) -> bool:
        """True if a prompt is left to read that takes more than a chunk, or has taken one."""

    def has_decoding(self) -> bool:
        """True if `decode` would do anything."""
        return False

    def shared_pass_s(self, tokens: int) -> float:
        """Return how many seconds of a pass over a prompt of that many tokens other prompts could
        share, because one pass reads them together; 0 if its tokens take longer, or nothing is
        known."""
        return 0.0

    def step(self) -> StepResult:
        """Run one decode step for the rows that decode, and at most one chunk of prefill.

        Raises:
            Exception: any; the engine is unusable afterwards and the process must end.
        """

    def decode(self) -> StepResult:
        """Run a step that reads no prompt; raise what `step` raises."""
        return StepResult()

    def settle(self) -> None:
        """Does what the last step has left for when its tokens are on their way, such as keeping
        what ended rows have read."""
        return

    def prepare(self) -> bool:
        """Does a short piece of work that makes later requests faster; called while there has been
        none for a while.

        Returns:
            False, and nothing was done, if there is no such work left.
        """
        return False

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """Frees what is only kept for speed; called after a while without a request, and between
        two steps when the supervisor needs the memory.

        Args:
            keeps_prefixes: whether what is known of earlier prompts stays.
        """

    def bound_rows(self, rows_bytes: int) -> None:
        """Set the bytes that rows may take from now on. An engine that would take far more while it
        computes than its arrays do keeps that within the same bound, if it can.

        Args:
            rows_bytes: see `SetBudget.rows_bytes`.
        """
        return

    def bytes_held(self) -> EngineBytes:
        """Return the memory as the engine counts it."""

    def close(self) -> None:
        """Frees everything and restores the process's limits; once, on the owner thread (E2)."""
