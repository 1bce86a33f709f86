"""Loads a checked folder into a model with every array in memory.

mlx-lm is imported where it is needed, because weights are read while its own imports take place.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version
from itertools import count, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import mlx.core as mx

from mlxsup.protocol.launch import LaunchSpec

from ...engine import BadModelError, GpuFaultElsewhereError, NoDeviceError
from .folder import ModelFolder
from .imports import naming_what_is_missing
from .kernels import discard_if_unloadable, keep_plans, use_kernel_folder
from .quirks import Remedy, find_fault

P = ParamSpec("P")
R = TypeVar("R")

READ_BYTES = 256 * 1024 * 1024
"""How much is read between two reports of progress. With 64 MiB readers wait for each other: until
13.7 GB are in an H200 takes 3.4 s instead of 2.6."""

GROUP_BYTES = READ_BYTES // 2
"""How much of a model is evaluated between two reports: what its arrays are made of is in memory,
too, such as experts that are stacked."""

SHARE_GROUPS = 200
"""Into so many groups a rank divides its share, because while a group is read the parts of other
ranks are in memory, too: with `READERS` groups under way, 4 % of the share for each other rank."""

READERS = 8
"""Streams that read weights at the same time, at most; as many groups are under way."""

MOST_OPEN = 64
"""Files that are open for it at most, unless there are more: a process on a Mac may open 256."""

MOST_LAZY = 1000
"""Of more files each is read as it is opened: an array that is still to be read keeps its file
open, and mlx-lm sets the limit of open files to 2048."""

MAX_CAUSE_CHARACTERS = 300

MAX_SEARCHED = 10_000
"""Characters of an error that are searched for names of arrays."""

_MEMORY_TEXTS = (
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "unable to allocate",
    "failed to allocate",
    "maximum allowed buffer size",
    "bad_alloc",
)


def is_memory_text(text: str) -> bool:
    """True if a message from MLX says that there was not enough memory."""
    lowered = text.lower()
    return any(memory_text in lowered for memory_text in _MEMORY_TEXTS)


def raise_if_memory(error: Exception) -> None:
    """Turns MLX's RuntimeErrors about memory into what they mean.

    Raises:
        MemoryError: that is what the error says.
    """
    if is_memory_text(str(error)):
        raise MemoryError(shorten(error)) from error


def raise_if_innocent(error: Exception) -> None:
    """Tells apart what Metal calls an innocent victim: the fault was another process's.

    Raises:
        GpuFaultElsewhereError: that is what the error says.
    """
    if "innocentvictim" in str(error).lower().replace(" ", ""):
        raise GpuFaultElsewhereError(shorten(error)) from error


MODEL_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model type's code, or MLX below it, raises if it cannot compute something."""

_GPU_FAILED = re.compile(
    r"command buffer execution failed|^cu\w+\(.*\) failed|^cu\w+ failed"
    r"|failed to load compiled|there is no kernel named"
)
"""How MLX says that the GPU did not finish what it was given: Metal's command buffers (timed out,
hung, interrupted for the display), CUDA's and its libraries' calls, a kernel that was kept and is
damaged. Another attempt may succeed."""


def raise_if_passing(error: Exception) -> None:
    """Re-raises errors that are not the model's fault and may not occur again.

    Raises:
        MemoryError: not enough memory now.
        GpuFaultElsewhereError: another process's fault on the GPU.
        RuntimeError: a command of the GPU failed or timed out.
    """
    raise_if_memory(error)
    raise_if_innocent(error)
    discard_if_unloadable(error)
    if isinstance(error, RuntimeError) and _GPU_FAILED.search(str(error).lower()):
        raise error


@contextmanager
def blaming_the_model(path: str) -> Iterator[None]:
    """Files that load but do not fit together, or that this MLX cannot compute, show it in the
    first passes (B6).

    Args:
        path: the model folder.

    Raises:
        BadModelError: instead of what a pass raised, unless that is not the fault of the model.
    """
    try:
        yield
    except MODEL_FAULTS as error:
        raise_if_passing(error)
        raise BadModelError(f"{path}: the model cannot run: {shorten(error)}") from error


def judging_errors(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method that may evaluate arrays while rows are served: MLX raises an error about
    earlier work wherever the next array is evaluated, and only some errors accuse rows.

    Raises:
        MemoryError: MLX ran out of memory.
        GpuFaultElsewhereError: another process's fault on the GPU.
        RuntimeError: any other error of MLX; a row may have caused it.
    """

    @wraps(method)
    def judged(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except RuntimeError as error:
            raise_if_memory(error)
            raise_if_innocent(error)
            discard_if_unloadable(error)
            raise

    return judged


def shorten(error: BaseException) -> str:
    """Return an error's text in one line, cut off if it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_CAUSE_CHARACTERS else text[:MAX_CAUSE_CHARACTERS] + "…"


def choose_kernels(spec: LaunchSpec) -> None:
    """Has MLX for CUDA keep what it compiles, and on a CPU compile nothing; before anything is
    computed.

    On a CPU, MLX has g++ build what it fuses in a folder that all users of the machine share
    (`/tmp/mlx`), and runs whatever library it finds there: of another user, who may have closed
    the folder to us, or cut short, which ends every worker. Unfused, the numbers are the same,
    and a step takes less than a hundredth longer.
    """
    if mx.cuda.is_available():
        keep_plans()
        device = mx.device_info().get("architecture", "")
        use_kernel_folder(spec.learned_dir, model=spec.model, version=f"{version('mlx')}-{device}")
    elif mx.default_device() == mx.cpu:
        mx.disable_compile()


def open_stream() -> tuple[str, mx.Stream]:
    """Return the backend that MLX uses here (`cpu`, `cuda` or `metal`) and a stream of this thread
    on it, tried with one sum: nothing runs on any other stream before (A2).

    Raises:
        NoDeviceError: it has none that works.
    """
    try:
        device = mx.default_device()
        if not mx.is_available(device):
            raise NoDeviceError(f"MLX's default device {device} is not available on this machine")
        stream = mx.new_stream(device)
        with mx.stream(stream):
            mx.eval(mx.zeros(1) + 1)
    except RuntimeError as error:
        raise_if_memory(error)
        raise NoDeviceError(f"MLX has no usable device: {shorten(error)}") from error
    if device.type == mx.cpu:
        return "cpu", stream
    return "metal" if mx.metal.is_available() else "cuda", stream


Weights = MutableMapping[Path, dict[str, mx.array]]
"""The arrays of files, by name."""


def read_weights(
    folder: ModelFolder, limit_bytes: int | None, report: Callable[[float], None]
) -> Weights:
    """Read a folder's files into memory before there is a model, which needs no more than MLX.

    None is read if the files are no safetensors, too many to be open, or larger than the limit: a
    model may need less of them. They are left to `load_lazily`, and to `materialise`.

    Args:
        folder: of the model.
        limit_bytes: for all of them; None: no limit.
        report: called with the share of the bytes that are in memory.

    Raises:
        BadModelError: a file cannot be read.
        MemoryError: not enough memory now.
    """
    is_usual = all(shard.suffix == ".safetensors" for shard in folder.shards)
    has_room = limit_bytes is None or folder.weight_bytes <= limit_bytes
    if not is_usual or not has_room or len(folder.shards) > MOST_LAZY:
        return {}
    streams = _count_streams()
    with _reading(folder), reading_side_by_side(len(folder.shards), streams):
        weights: Weights = {
            shard.resolve(): cast(dict[str, mx.array], mx.load(str(shard)))
            for shard in folder.shards
        }
        arrays = [array for held in weights.values() for array in held.values()]
        read_arrays(arrays, READ_BYTES, report)
    return weights


def _count_streams() -> int:
    return min(READERS, os.cpu_count() or 1)


def load_lazily(
    folder: ModelFolder,
    report: Callable[[float], None] = lambda share: None,
    load: Callable[..., tuple[Any, dict[str, Any]]] | None = None,
    weights: Weights | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return the model and its configuration; arrays are still to be read, unless there are more
    than `MOST_LAZY` files.

    Args:
        folder: of the model.
        report: called with the share of the files that were read, if they are read now.
        load: takes and returns what mlx-lm's `load_model` does; None: that.
        weights: what was read before, which is taken out of it.
        options: of `load`.

    Raises:
        BadModelError: mlx-lm cannot make a model of the folder; names the file and the cause.
        NoDeviceError: mlx-lm cannot be imported.
        MemoryError: not enough memory now.
    """
    with naming_what_is_missing():
        from mlx_lm.utils import load_model
    try:
        with _loadable(folder) as path:
            files = len(folder.shards)
            with reading_side_by_side(files, _count_streams(), report, weights):
                model, config = (load or load_model)(path, lazy=True, **options)
    except MemoryError:
        raise
    except SystemExit as error:
        # What a model file does if a package that it needs is missing, after a line in the log.
        raise BadModelError(
            f"{folder.path / 'config.json'}: mlx-lm failed to load model type "
            f"{folder.config['model_type']}; see its output in the log"
        ) from error
    except Exception as error:
        # The loader runs hundreds of architectures' own code on what the files say: whatever it
        # raises, short of memory, these files cannot be loaded by this mlx-lm (B6).
        raise_if_memory(error)
        raise BadModelError(f"{_culprit(folder, error)}: {_sentence(error)}") from error
    fault = find_fault(folder.config)
    if fault is not None and fault.remedy is Remedy.WIDEN_WINDOWS:
        widen_windows(model)
    return model, config


@contextmanager
def reading_side_by_side(
    files: int,
    streams: int,
    report: Callable[[float], None] = lambda share: None,
    weights: Weights | None = None,
) -> Iterator[None]:
    """Have what mlx-lm loads in the block read by several streams of the CPU: one stream reads
    1.8 GB/s of an 8B model from memory, eight read 9.

    The arrays of a file are dealt out to the streams, or to some of them if there are many files:
    each stream opens it once more. All of this happens on the calling thread; what the streams have
    to do waits until the arrays are asked for.

    Args:
        files: how many there are.
        streams: how many to use.
        report: see `load_lazily`.
        weights: see there.
    """
    opened = count(1)
    plain = mx.load
    readers = [mx.new_stream(mx.cpu) for _ in range(streams)]
    next_reader = cycle(readers)
    times = max(min(streams, MOST_OPEN // max(files, 1)), 1)

    def load(file: Any, *args: Any, **named: Any) -> Any:
        if weights and (place := Path(file).resolve()) in weights:
            return weights.pop(place)
        parts: list[Any] = [
            plain(file, *args, stream=next(next_reader), **named) for _ in range(times)
        ]
        if files > MOST_LAZY:
            mx.eval(parts[0])
            report(next(opened) / files)
        if times == 1 or not isinstance(parts[0], dict):
            return parts[0]
        return {name: parts[nth % times][name] for nth, name in enumerate(parts[0])}

    mx.load = load  # mlx-lm takes no stream
    try:
        yield
    finally:
        mx.load = plain


@contextmanager
def _loadable(folder: ModelFolder) -> Iterator[Path]:
    """Provide a folder with the files of the model only, because mlx-lm loads all that it finds.

    Arrays that are still to be read keep their files open.
    """
    if not folder.strays:
        yield folder.path
        return
    with TemporaryDirectory(prefix="mlxsup-") as links:
        for path in folder.path.absolute().iterdir():
            if path.name not in folder.strays:
                (Path(links) / path.name).symlink_to(path)
        yield Path(links)


def widen_windows(model: Any) -> None:
    """Lets every cache of a sliding window that the model makes from now on keep one key more."""
    from mlx_lm.models.cache import RotatingKVCache

    make_cache = model.make_cache

    def make_wider_cache() -> list[Any]:
        caches: list[Any] = make_cache()
        for cache in caches:
            if isinstance(cache, RotatingKVCache):
                cache.max_size += 1
        return caches

    model.make_cache = make_wider_cache


def _sentence(error: Exception) -> str:
    """Return an error of the loader as a sentence; some of Python's mean nothing by themselves."""
    match error:
        case KeyError():
            return f"{shorten(error)} is missing"
        case TypeError() | AttributeError() | IndexError() | ArithmeticError() | AssertionError():
            return f"a value is not what mlx-lm expects ({shorten(error)})"
        case _:
            return shorten(error)


def _culprit(folder: ModelFolder, error: Exception) -> str:
    """Return the file that an error of the loader is most likely about."""
    text = str(error)[:MAX_SEARCHED]  # an error may name each of 100,000 arrays
    named = [name for name in folder.shard_of if name in text]
    if named:
        return str(folder.shard_of[max(named, key=len)])
    if text.startswith("Missing"):
        return str(folder.shards[0] if len(folder.shards) == 1 else folder.path)
    if "[load" in text or "safetensors" in text:
        return str(next((s for s in folder.shards if s.name in text), folder.path))
    return str(folder.path / "config.json")


def materialise(
    root: Any,
    folder: ModelFolder,
    report: Callable[[float], None],
    *,
    is_share: bool = False,
) -> None:
    """Evaluates every array that a model refers to, on the calling thread (A4).

    Args:
        root: the module tree.
        folder: named when an array cannot be read.
        report: called with the share of the bytes that are in memory.
        is_share: whether arrays are parts of others, all of which are read for that.

    Raises:
        BadModelError: a weight file cannot be read.
        MemoryError: not enough memory now.
    """
    arrays = list(iterate_arrays(root))
    total = sum(array.nbytes for array in arrays)
    with _reading(folder):
        read_arrays(
            arrays, min(GROUP_BYTES, total // SHARE_GROUPS) if is_share else GROUP_BYTES, report
        )


def read_arrays(
    arrays: Sequence[mx.array], group_bytes: int, report: Callable[[float], None]
) -> None:
    """Evaluate arrays in groups, `READERS` of which are under way.

    With CUDA, what the CPU has read moves to the GPU while the next ones are read: left to the
    first pass, the pages of a 7B model take it 1.8 s.

    Args:
        arrays: in the order in which they are read.
        group_bytes: of each group, at least.
        report: called with the share of the bytes that are in memory.
    """
    total = sum(array.nbytes for array in arrays) or 1
    done = 0
    under_way: deque[list[mx.array]] = deque()
    moving: list[mx.array] = []
    groups = iter(_groups(arrays, group_bytes))
    for group in islice(groups, READERS):
        under_way.append(_begin(group))
    while under_way:
        group = under_way.popleft()
        done += _wait_for(group)
        if mx.cuda.is_available():
            moving += _begin([mx.sum(array) for array in group])
        report(done / total)
        under_way.extend(_begin(group) for group in islice(groups, 1))
    if moving:
        mx.eval(moving)
    report(1.0)


@contextmanager
def _reading(folder: ModelFolder) -> Iterator[None]:
    """Say which file of a folder could not be read.

    Raises:
        BadModelError: a weight file cannot be read.
        MemoryError: not enough memory now.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise_if_memory(error)
        if isinstance(error, ValueError) or "[read" in str(error) or "[load" in str(error):
            raise BadModelError(f"{_culprit(folder, error)}: {shorten(error)}") from error
        raise


def _groups(arrays: Iterable[mx.array], least_bytes: int) -> Iterator[list[mx.array]]:
    """Yield arrays in groups of so many bytes."""
    group: list[mx.array] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= least_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _begin(group: list[mx.array]) -> list[mx.array]:
    """Have arrays evaluated, and return them."""
    mx.async_eval(group)  # type: ignore[no-untyped-call]
    return group


def _wait_for(group: Sequence[mx.array]) -> int:
    """Return the bytes of arrays once all of them are in memory."""
    mx.eval(group)
    return sum(array.nbytes for array in group)


def iterate_arrays(root: Any) -> Iterator[mx.array]:
    """Every array reachable from a module: parameters, frozen buffers, underscore attributes.

    `Module.parameters()` leaves out attributes with an underscore (YarnRoPE `_freqs`) and those of
    plain objects; loaders leave just these lazy, bound to the loading thread's stream.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | FunctionType | str | bytes):
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            yield value
            continue
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            waiting.extend(value)
        waiting.extend(getattr(value, "__dict__", {}).values())
