"""The engine over mlx-lm: load, warm up, step, close, all on one thread (A1).

MLX is imported inside `load`, so that the import is reported as part of it and so that a machine
without MLX gets an answer, not a traceback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.context_length import find_context_length
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.parameters import makers_sampling
from mlxsup.protocol.states import Batching, LoadPhase
from mlxsup.protocol.text import size_text

from ...engine import (
    BadLaunchError,
    EngineBytes,
    EngineFacts,
    Rank,
    ReportProgress,
    Row,
    RowSetAside,
    StepResult,
    TextCodec,
)
from .folder import ModelFolder, check_folder, fingerprint, reading_ahead
from .imports import importing_libraries, naming_what_is_missing, stay_offline
from .prefill import (
    FIXED_CHUNK,
    LARGEST_CHUNK,
    LARGEST_CPU_CHUNK,
    MOST_READ_TOKENS,
    CostModel,
    SerialScheduler,
    TogetherScheduler,
)
from .quirks import find_warnings
from .ranks import join, take_share
from .shapes import SeenShapes

if TYPE_CHECKING:
    import mlx.core as mx

    from .batch import MlxBatch
    from .capability_probe import Finding
    from .draft_model import DraftModel
    from .drafts import Drafts
    from .limits import MemoryLimits
    from .loader import Weights
    from .prefix_cache import PrefixCache
    from .text import MlxText
    from .vision import VisionModel
    from .warm_up import WarmUp

HALF = 200
"""After this many steps half of the way from the weights to READY is shown."""

MOST = 100_000
"""A load with more steps than this never ends: they are no longer progress."""


class LoadSteps:
    """The steps of one load before READY, as progress: each renews the limit of a stalled load.

    Their number is not known beforehand. With CUDA each of them may compile kernels for half a
    minute, so all together may take longer than `load_stall_timeout_s`; none of them may.

    Args:
        show: takes the progress of the load.
        begin: the progress before the first step, below 1.
    """

    def __init__(self, show: Callable[[float], None], begin: float) -> None:
        self._show = show
        self._begin = begin
        self._taken = 0

    def __call__(self) -> None:
        """Another step has ended, or the first one begins."""
        self._show(self._begin + (1.0 - self._begin) * self._taken / (self._taken + HALF))
        self._taken = min(self._taken + 1, MOST)


COMFORTABLE_SHARE = 0.8
"""A share of `memory`: if more is in use before the first request, MLX constantly frees and takes
memory, which doubles the time of a step."""


def check_weights(path: Path, weight_bytes: int, limit_bytes: int | None) -> None:
    """Refuses a model that cannot fit, before its weights are read.

    Args:
        path: the model folder.
        weight_bytes: size of its arrays.
        limit_bytes: the entry's `memory`; None: no limit.

    Raises:
        BadLaunchError: names both numbers.
    """
    if limit_bytes is not None and weight_bytes > limit_bytes:
        raise BadLaunchError(
            f"the weights of {path} need {size_text(weight_bytes)}, but memory is limited to "
            f'{size_text(limit_bytes)}; set memory to "auto"'
        )


def memory_warnings(active_bytes: int, limit_bytes: int | None) -> tuple[str, ...]:
    """The warning for a model that is loaded and leaves too little of its `memory`."""
    if limit_bytes is None or active_bytes <= COMFORTABLE_SHARE * limit_bytes:
        return ()
    return (
        f"{size_text(active_bytes)} of the memory limit of {size_text(limit_bytes)} are in use "
        "before the first request, which makes answers slow; set memory to at least "
        f'"{size_text(math.ceil(active_bytes / COMFORTABLE_SHARE))}"',
    )


NO_NUMBERS = "its log-probabilities are not numbers (NaN), so its answers are meaningless"
"""The warning for a model whose weights do not fit its configuration, or are broken."""

NO_FIXED_DRAFTS = (
    "drafts have no effect: the model is deterministic, and how many tokens a pass with guesses "
    "reads depends on the machine's speed"
)
"""The warning for a deterministic model whose configuration lets rows guess."""

CHECKED = 0.05
IMPORTED = 0.2
WEIGHTS_FOUND = 0.5
MATERIALISED = 0.75


def find_folder(spec: LaunchSpec, report: ReportProgress) -> ModelFolder:
    """Return the checked folder of a worker's model, before the import, which takes a second.

    Raises:
        ModelMissingError, BadModelError: permanent.
    """
    # A model is a local folder, or it is an error: nothing is ever fetched.
    stay_offline()
    report(LoadPhase.IMPORT, 0.0)
    return check_folder(Path(spec.path), lambda share: report(LoadPhase.IMPORT, CHECKED * share))


def open_device(spec: LaunchSpec) -> tuple[str, Any, MemoryLimits]:
    """Import MLX, and set this process's limits; return the backend, the stream of every pass, and
    the limits.

    Raises:
        NoDeviceError: MLX is not installed, or not for this machine.
    """
    with naming_what_is_missing():
        from .decode_attention import use_decode_attention
        from .limits import MemoryLimits
        from .loader import choose_kernels, open_stream
    choose_kernels(spec)
    # Made before any work, and kept for all of it (A2).
    backend, stream = open_stream()
    if backend == "cuda":
        use_decode_attention()
    limits = MemoryLimits(spec, backend)
    limits.set()
    return backend, stream, limits


def model_fingerprint(folder: ModelFolder, backend: str, versions: Mapping[str, str]) -> str:
    """Return what changes when the same request might give another answer: with the files, with
    the libraries, or with how we run rows and draw tokens."""
    from .capability_probe import PROBE_VERSION
    from .sampler import SAMPLER_VERSIONS, choose_draw

    sampler = SAMPLER_VERSIONS[choose_draw(backend)]
    ours = {"kv_cache": "plain", "probe": PROBE_VERSION, "sampler": sampler}
    return fingerprint(folder, {**versions, **ours})


class MlxEngine:
    """One MLX model; every method belongs to the thread that calls `load`.

    Attributes:
        model: materialised; None before `load` and after `close`.
        stream: of every pass; there after `load`.
        batch: its rows; None before `load` and after `close`.
        prefixes: what earlier rows have computed; None before `load`.

    Args:
        spec: the worker's launch spec.
        clock: see `MlxBatch`.
        rank: its place among those that serve the model together; None: it serves it alone.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        clock: Callable[[], float] = time.perf_counter,
        rank: Rank | None = None,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._group: mx.distributed.Group | None = None
        self._parallel = ""
        self._clock = clock
        self.model: Any = None
        self._model_type = ""
        self._adapters: dict[str, str] = {}  # their digests
        self.stream: Any = None
        self.batch: MlxBatch | None = None
        self.prefixes: PrefixCache | None = None
        self._text: MlxText | None = None
        self._vision: VisionModel | None = None
        self._draft: DraftModel | None = None
        self._picture_warnings: tuple[str, ...] = ()
        self._facts: EngineFacts | None = None
        self._limits: MemoryLimits | None = None
        self._warm_up_work: WarmUp | None = None

    def load(self, report: ReportProgress) -> EngineFacts:
        """Loads, materialises every array, builds the batch and warms it up, leaving no row.

        Raises:
            ModelMissingError, BadModelError, BadLaunchError, NoDeviceError: permanent.
            MemoryError: not enough memory now.
        """
        folder = find_folder(self._spec, report)
        with reading_ahead(folder.shards):
            backend, self.stream, self._limits = open_device(self._spec)
            report(LoadPhase.IMPORT, IMPORTED)
            if self._rank is not None:
                self._group = join(self._rank)
            self._load_model(folder, report)
        libraries = ("mlx", "mlx-lm", "mlx-vlm") if self._vision is not None else ("mlx", "mlx-lm")
        versions = {name: version(name) for name in libraries}
        self._facts = self._find_facts(folder, backend, versions)
        steps = LoadSteps(lambda share: report(LoadPhase.WARMUP, share), MATERIALISED)
        steps()  # the phase begins
        self._check_group(folder, steps)
        self._choose_way(steps)
        self._make_batch()
        self._warm_up(steps)
        report(LoadPhase.WARMUP, 1.0)
        self._open_prefix_cache()
        held = memory_warnings(self.bytes_held().active, self._spec.memory_limit_bytes)
        self._facts = replace(self._facts, warnings=(*self._facts.warnings, *held))
        return self._facts

    @property
    def facts(self) -> EngineFacts:
        """What the load found out; there after `load`."""
        if self._facts is None:
            raise RuntimeError("the engine is not loaded")
        return self._facts

    def _load_model(self, folder: ModelFolder, report: ReportProgress) -> None:
        import mlx.core as mx

        from .loader import iterate_arrays, materialise, read_weights
        from .pictures import has_vision_tower

        def report_weights(share: float) -> None:
            report(LoadPhase.WEIGHTS, IMPORTED + (WEIGHTS_FOUND - IMPORTED) * share)

        report_weights(0.0)
        with mx.stream(self.stream):
            weights: Weights = {}
            # A rank needs a share of them, and a model without its tower leaves that out.
            if self._rank is None and not has_vision_tower(folder):
                with importing_libraries():
                    weights = read_weights(folder, self._spec.memory_limit_bytes, report_weights)

            with naming_what_is_missing():
                from .adapters import adapt, read_adapters
                from .logits import FloatLogits
            adapters = read_adapters(self._spec.adapters)
            self._adapters = {adapter.name: adapter.digest for adapter in adapters}
            model = self._open_model(folder, weights, report_weights)
            if self._rank is not None:
                assert self._group is not None
                self._parallel = take_share(
                    model,
                    folder,
                    self._group,
                    parallel=self._spec.parallel,
                    backend=self._rank.backend,
                )
            self._draft = self._open_draft(folder)
            # Not the files' sizes: mlx-lm leaves parts out (vision), and may widen others.
            both = (model, None if self._draft is None else self._draft.model)
            weight_bytes = sum(array.nbytes for one in both for array in iterate_arrays(one))
            check_weights(folder.path, weight_bytes, self._spec.memory_limit_bytes)
            report(LoadPhase.WEIGHTS, WEIGHTS_FOUND)
            width = MATERIALISED - WEIGHTS_FOUND
            materialise(
                model,
                folder,
                lambda share: report(LoadPhase.MATERIALISE, WEIGHTS_FOUND + width * share),
                is_share=self._group is not None,
            )
            if self._draft is not None:
                materialise(self._draft.model, self._draft.folder, lambda share: None)
            if adapters:
                model = adapt(model, adapters)
        self.model = FloatLogits(model)
        self.model.group = self._group
        self._model_type = str(folder.config["model_type"])

    def _open_model(
        self, folder: ModelFolder, weights: Weights, report: Callable[[float], None]
    ) -> Any:
        """Return the model, whose arrays are still to be read, and open its text side."""
        from .loader import load_lazily, shorten
        from .pictures import NO_EXTRA, has_vision_tower, is_installed

        hint = None
        if has_vision_tower(folder):
            if self._rank is not None:
                hint = "send text, because several hosts serve it"
            elif self._spec.adapters:
                # Their layers have the names of mlx-lm's model, which has no tower.
                hint = "send text, because it is served with adapters"
            elif is_installed():
                try:
                    return self._open_vision(folder, report)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001
                    # Two libraries' own code on what the files say: text can be served in any case.
                    said = f"{type(error).__name__}: {shorten(error)}"
                    warning = f"it takes no pictures, because its tower cannot be used: {said}"
                    self._picture_warnings = (warning,)
            else:
                hint = NO_EXTRA
        model, config = load_lazily(folder, report, weights=weights)
        self._text = self._open_text(folder, config)
        self._text.picture_hint = hint or self._text.picture_hint
        return model

    def _open_draft(self, folder: ModelFolder) -> DraftModel | None:
        """Return the draft model, if there is to be one; its arrays are still to be read."""
        from .draft_model import open_draft_model

        if not self._spec.draft_folder or self._spec.deterministic:
            return None
        assert self._text is not None
        vocabulary = self._text.inner_tokenizer.get_vocab()
        return open_draft_model(Path(self._spec.draft_folder), folder, vocabulary)

    def _open_text(self, folder: ModelFolder, config: Mapping[str, Any]) -> MlxText:
        from .text import load_text

        return load_text(
            folder.path,
            eos_token_ids=config.get("eos_token_id"),
            vocabulary_size=folder.number("vocab_size"),
        )

    def _open_vision(self, folder: ModelFolder, report: Callable[[float], None]) -> VisionModel:
        """The same for a model with a vision tower, which has seen a picture then.

        Raises:
            Exception: of the libraries; it cannot.
        """
        from .loader import load_lazily
        from .pictures import load_processor, probe_picture
        from .vision import VisionModel, load_vision

        processor = load_processor(folder)
        inner, config = load_lazily(folder, report, load_vision)
        model, text = VisionModel(inner), self._open_text(folder, config)
        context = find_context_length(folder.config, self._spec.context_length)
        text.read_pictures(processor, context.tokens)
        assert text.pictures is not None
        model.look(text.pictures.alone(probe_picture()))
        model.make_cache()
        model.forget()
        self._text, self._vision = text, model
        return model

    def _check_group(self, folder: ModelFolder, steps: LoadSteps) -> None:
        """Raise if the ranks compute something wrong; see `check_group`."""
        import mlx.core as mx

        from .known_answer import check_group

        if self._group is None:
            return
        with mx.stream(self.stream):
            check_group(self.model, folder, self._group, facts=self.facts, report=steps)

    def _choose_way(self, steps: LoadSteps) -> None:
        """Finds out how rows may share passes, unless an earlier life has."""
        from .capability_probe import UNTRIED, log_finding

        # A fingerprint covers the times of files. In a group it is the leader's alone: the other
        # ranks would probe, and wait for passes that the leader does not make.
        known = (self._spec.known_batching if self._rank is None else None) or {}
        if (
            known.get("fingerprint") == self.facts.fingerprint
            and known.get("batching") in list(Batching)
            and known.get("reason") not in UNTRIED
        ):
            way, reason = Batching(known["batching"]), known.get("reason", "")
            self._facts = replace(self.facts, batching=way, batching_reason=reason)
            return
        started = time.perf_counter()
        finding = self._find_way(steps)
        self._facts = replace(self.facts, batching=finding.way, batching_reason=finding.reason)
        log_finding(finding, self._spec.model, round(time.perf_counter() - started, 2))

    def _find_way(self, steps: LoadSteps) -> Finding:
        from .capability_probe import CapabilityProbe
        from .loader import blaming_the_model

        finder = CapabilityProbe(
            self.model,
            model_type=self._model_type,
            stream=self.stream,
            is_exact=self.facts.backend == "cpu",
            max_concurrency=self._spec.max_concurrency,
            context_length=self.facts.context_length,
            vocabulary_size=self.facts.vocabulary_size,
            report=steps,
        )
        with blaming_the_model(self._spec.path):
            return finder.find()

    def _make_batch(self) -> None:
        from .batch import MlxBatch
        from .batch_modes import make_mode
        from .prefix_cache import PrefixCache
        from .sampler import choose_draw

        assert self._text is not None
        way = self.facts.batching
        costs = CostModel(
            decode_stall_target_s=self._spec.decode_stall_target_ms / 1000,
            step_timeout_s=self._spec.step_timeout_s,
            is_fixed=self._spec.deterministic,
            largest_chunk=LARGEST_CPU_CHUNK if self.facts.backend == "cpu" else LARGEST_CHUNK,
        )
        kind = TogetherScheduler if way is Batching.TOGETHER else SerialScheduler
        scheduler = kind(
            costs,
            decode_share=self._spec.decode_share,
            most_prompts=None if self._group is None else MOST_READ_TOKENS // FIXED_CHUNK,
        )
        self.prefixes = PrefixCache()
        drafts = self._make_drafts()
        draw = choose_draw(self.facts.backend)
        self.batch = MlxBatch(
            make_mode(way, self.model, stream=self.stream, draw=draw, drafts=drafts),
            scheduler,
            stream=self.stream,
            stop_tokens=self._text.stop_tokens,
            spared_tokens=self._text.spared_tokens,
            costs=costs,
            prefixes=self.prefixes,
            adapters=self.facts.adapters,
            shapes=SeenShapes() if self.facts.backend == "cuda" else None,
            drafts=drafts,
            clock=self._clock,
        )
        if self._limits is not None:
            self._limits.set_wired()

    def _make_drafts(self) -> Drafts | None:
        """Return what rows guess by, if they are to and can; the facts say which."""
        from .drafts import Drafts, is_cuttable

        if self._spec.drafts == "off":
            return None
        if self._spec.deterministic:
            warnings = (*self.facts.warnings, NO_FIXED_DRAFTS)
            self._facts = replace(self.facts, warnings=warnings)
            return None
        self._facts = replace(self.facts, draft_tokens=self._spec.draft_tokens)
        return Drafts(
            self._spec.draft_tokens,
            self.facts.context_length,
            is_cuttable=is_cuttable(self.model, self.facts.batching),
            model=self._draft,
        )

    def _find_facts(
        self, folder: ModelFolder, backend: str, versions: dict[str, str]
    ) -> EngineFacts:
        assert self._text is not None
        context = find_context_length(folder.config, self._spec.context_length)
        own = model_fingerprint(folder, backend, versions)
        if self._rank is not None:
            # A pipeline rounds as one host does; sums of other parts are rounded otherwise.
            own += f"+tensor{self._rank.size}" if self._parallel == "tensor" else "+pipeline"
        return EngineFacts(
            context_length=context.tokens,
            vocabulary_size=self._text.vocabulary_size,
            fingerprint=own,
            adapters={name: f"{own}+{digest}" for name, digest in self._adapters.items()},
            backend=backend,
            versions=versions,
            warnings=(
                *context.warnings,
                *find_warnings(folder.path, folder.config),
                *self._picture_warnings,
            ),
            takes_pictures=self._vision is not None,
            parallel=self._parallel,
            sampling=makers_sampling(folder.generation_config),
        )

    def _warm_up(self, steps: LoadSteps) -> None:
        """Runs short requests, and learns from them how fast the model is."""
        from .loader import blaming_the_model
        from .warm_up import warm_up

        batch = self._ready()
        with blaming_the_model(self._spec.path):
            self._warm_up_work = warm_up(batch, self._spec, self.facts, steps)
        self._narrow_vocabulary(batch.logits_width)
        if not batch.gives_numbers:
            warnings = (*self.facts.warnings, NO_NUMBERS)
            self._facts = replace(self.facts, warnings=warnings, answer_warnings=(NO_NUMBERS,))

    def _open_prefix_cache(self) -> None:
        """From now on rows are kept; before, neither the model nor its memory was final."""
        import mlx.core as mx

        from .caches import measure_layers
        from .drafts import with_guesses
        from .prefix_cache import find_room

        assert self._text is not None
        assert self.prefixes is not None
        with mx.stream(self.stream):
            layers = measure_layers(self.model)
            room = find_room(self.model, layers, self._spec, self.facts)
        if self.facts.draft_tokens:
            layers = with_guesses(layers, self.facts.draft_tokens)
            if self._draft is not None:
                with mx.stream(self.stream):
                    layers += with_guesses(
                        measure_layers(self._draft.model), self._spec.draft_tokens
                    )
        self.prefixes.room = room
        self._text.wants_checkpoints = room.max_bytes > 0 and room.cuttable_tokens is not None
        self._facts = replace(
            self.facts,
            prefix_cache_bytes=room.max_bytes,
            prefix_cache_tokens=room.row_tokens,
            cache_layers=layers,
        )

    def _narrow_vocabulary(self, logits_width: int | None) -> None:
        """A tokenizer may know ids that the model has no output for; a bias or a penalty for one
        of them would write beyond the logits."""
        assert self._text is not None
        if logits_width is not None and logits_width < self.facts.vocabulary_size:
            self._text.vocabulary_size = logits_width
            self._facts = replace(self.facts, vocabulary_size=logits_width)

    @property
    def text(self) -> TextCodec:
        """The model's text side; available after `load`."""
        if self._text is None:
            raise RuntimeError("the engine is not loaded")
        return self._text

    def insert(self, row: Row) -> int:
        """Adds a row and returns how many of its tokens need no prefill."""
        return self._ready().insert(row)

    def remove(self, *keys: RequestKey) -> None:
        """Takes rows out at once, in prefill or decode; unknown keys are ignored."""
        self._ready().remove(*keys)

    def set_aside(self, *keys: RequestKey, keep: bool) -> list[RowSetAside]:
        """See `Engine.set_aside`."""
        return self._ready().set_aside(*keys, keep=keep)

    def drop_kept(self, *keys: RequestKey) -> None:
        """See `Engine.drop_kept`."""
        self._ready().drop_kept(*keys)

    def free_kept(self, *, spared: RequestKey | None = None) -> None:
        """See `Engine.free_kept`."""
        self._ready().free_kept(spared=spared)

    def row_count(self) -> int:
        """See `Engine.row_count`."""
        return 0 if self.batch is None else self.batch.row_count()

    def predict_step_s(self) -> float:
        """How long the next step should take at most, from what was measured; 0 when unknown."""
        return self._ready().predict_step_s()

    def has_long_prompt(self) -> bool:
        """See `Engine.has_long_prompt`."""
        return self._ready().has_long_prompt()

    def has_decoding(self) -> bool:
        """See `Engine.has_decoding`."""
        return self._ready().has_decoding()

    def shared_pass_s(self, tokens: int) -> float:
        """See `Engine.shared_pass_s`."""
        return self._ready().shared_pass_s(tokens)

    def step(self) -> StepResult:
        """See `Engine.step` (F3); raises MemoryError if MLX ran out of memory."""
        return self._within_limits().step()

    def decode(self) -> StepResult:
        """A step that reads no prompt; raises what `step` raises."""
        return self._within_limits().decode()

    def _within_limits(self) -> MlxBatch:
        """The batch; known prompts and pictures were given up if its rows need their memory."""
        if self._limits is not None and self._limits.is_exceeded():
            if self.prefixes is not None:
                self.prefixes.clear()
            if self._vision is not None:
                self._vision.forget()
        return self._ready()

    def settle(self) -> None:
        """See `Engine.settle`."""
        self._ready().settle()

    def prepare(self) -> bool:
        """See `Engine.prepare`."""
        return self._warm_up_work is not None and self._warm_up_work.run_next_shape()

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        """Frees what is only kept for speed: known prompts, and memory for reuse."""
        if self._vision is not None:
            self._vision.forget()
        self._ready().give_back(keeps_prefixes=keeps_prefixes)

    def bound_rows(self, rows_bytes: int) -> None:
        """See `Engine.bound_rows`."""
        if self._limits is not None:
            self._limits.bound_rows(rows_bytes)

    def bytes_held(self) -> EngineBytes:
        """Memory as MLX counts it."""
        from .limits import bytes_held

        kept = 0 if self.batch is None else self.batch.kept_bytes
        prefixes = 0 if self.prefixes is None else self.prefixes.held_bytes
        return bytes_held(kept, prefixes + (0 if self._vision is None else self._vision.held_bytes))

    def close(self) -> None:
        """Frees everything and restores the process's limits; once, on the owner thread (E2)."""
        batch, limits = self.batch, self._limits
        self.batch = self._limits = self._warm_up_work = None
        if limits is None:
            return  # nothing was loaded, not even MLX
        if batch is not None:
            batch.close()
        limits.restore()
        # The batch runs the model: while it is held, so are the weights.
        del batch
        self.model = self._vision = self._draft = None
        import mlx.core as mx

        mx.clear_cache()

    def _ready(self) -> MlxBatch:
        if self.batch is None:
            raise RuntimeError("the engine is not loaded")
        return self.batch
