"""LoRA adapters of a model: each row of a batch may have another one, or none.

Every layer that an adapter changes keeps the matrices of all adapters in two stacks. A pass is told
the *slot* of each of its rows: 0 is the model itself, whose matrices are zeros, and the adapters
follow in the order of the configuration. A pass in which no row has an adapter computes what it
would without any. Matrices of a smaller rank are filled up with zeros.

The layouts of mlx-lm (`adapters.safetensors`) and of peft (`adapter_model.safetensors`) are read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.model_files import ADAPTER_CONFIG, MLX_ADAPTER, PEFT_ADAPTER

from ...engine import BadModelError, ModelMissingError
from .folder import read_json, read_safetensors_header
from .loader import blaming_the_model, raise_if_memory, shorten

if TYPE_CHECKING:
    from .sampler import RowDraws

PEFT_PREFIX = "base_model.model."

MERGE = "`mlx_lm.fuse` merges it into the weights"

FIRST_IDS = 2**21
"""No vocabulary has so many ids, and 32 bits hold as many times that as a model has adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter whose files have passed the checks that need no model.

    Attributes:
        name: as requests call it.
        file: with its matrices.
        rank: of all of them.
        scale: what their product is multiplied by.
        pairs: for each layer the names of its matrices A and B in the file.
        is_peft: whether they are transposed, as peft has them.
        digest: changes with its files.
    """

    name: str
    file: Path
    rank: int
    scale: float
    pairs: Mapping[str, tuple[str, str]]
    is_peft: bool
    digest: str


def read_adapters(folders: Mapping[str, str]) -> list[Adapter]:
    """Return the adapters in these folders, by name, as far as their headers tell.

    Raises:
        ModelMissingError: a folder or a file is not there.
        BadModelError: one is damaged, or no LoRA adapter; names the adapter.
    """
    found = []
    for name, folder in folders.items():
        try:
            found.append(_read(name, Path(folder)))
        except (BadModelError, ModelMissingError) as error:
            raise type(error)(f"adapter {name}: {error}") from error
        except OSError as error:
            where = error.filename or folder
            raise BadModelError(f"adapter {name}: {where}: {error.strerror or error}") from error
    return found


def _read(name: str, folder: Path) -> Adapter:
    if not folder.is_dir():
        raise ModelMissingError(f"the folder {folder} does not exist")
    config_file = folder / ADAPTER_CONFIG
    file = folder / MLX_ADAPTER
    is_peft = not file.is_file()
    if is_peft and (folder / PEFT_ADAPTER).is_file():
        file = folder / PEFT_ADAPTER
    for needed in (config_file, file):
        if not needed.is_file():
            shown = MLX_ADAPTER if is_peft and needed is file else needed.name
            raise ModelMissingError(f"{folder / shown} does not exist")
    is_peft = file.name == PEFT_ADAPTER
    config = read_json(config_file)
    rank, scale = (_of_peft if is_peft else _of_mlx_lm)(config_file, config)
    pairs = _pairs(file, read_safetensors_header(file), is_peft=is_peft)
    status = file.stat()
    content = config_file.read_bytes()
    stamp = f"{name} {file.name} {status.st_size} {status.st_mtime_ns // 1_000_000} ".encode()
    return Adapter(
        name=name,
        file=file,
        rank=rank,
        scale=scale,
        pairs=pairs,
        is_peft=is_peft,
        digest=hashlib.sha256(stamp + content).hexdigest(),
    )


def _of_mlx_lm(file: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return the rank and the scale that mlx-lm's configuration says."""
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise BadModelError(f"{file}: fine_tune_type must be lora, not {_shown(kind)}; {MERGE}")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise BadModelError(f"{file} has no lora_parameters")
    return _rank(file, "rank", parameters), _number(file, "scale", parameters)


def _of_peft(file: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return the rank and the scale that peft's configuration says."""
    if (kind := config.get("peft_type")) != "LORA":
        raise BadModelError(f"{file}: peft_type must be LORA, not {_shown(kind)}")
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_bias"):
        if config.get(key):
            raise BadModelError(
                f"{file}: {key} is not supported; merge it with peft's merge_and_unload, and serve"
                " the result as a model"
            )
    rank = _rank(file, "r", config)
    alpha = _number(file, "lora_alpha", config)
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _rank(file: Path, key: str, parameters: Mapping[str, Any]) -> int:
    rank = parameters.get(key)
    if type(rank) is not int or rank < 1:
        raise BadModelError(f"{file}: {key} must be an integer of 1 or more, not {_shown(rank)}")
    return rank


def _number(file: Path, key: str, parameters: Mapping[str, Any]) -> float:
    value: Any = parameters.get(key)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadModelError(f"{file}: {key} must be a number, not {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


def _pairs(
    file: Path, shapes: Mapping[str, Sequence[int]], *, is_peft: bool
) -> dict[str, tuple[str, str]]:
    """Return the names of the matrices of each layer."""
    ends = (".lora_A.weight", ".lora_B.weight") if is_peft else (".lora_a", ".lora_b")
    halves: dict[str, dict[str, str]] = {}
    for name in shapes:
        end = next((one for one in ends if name.endswith(one)), None)
        if end is None:
            raise BadModelError(f"{file}: {name[:200]} is no part of a LoRA adapter; {MERGE}")
        layer = name.removesuffix(end)
        halves.setdefault(layer.removeprefix(PEFT_PREFIX) if is_peft else layer, {})[end] = name
    if not halves:
        raise BadModelError(f"{file} holds no matrices")
    for layer, found in halves.items():
        if len(found) < len(ends):
            missing = next(end for end in ends if end not in found)
            raise BadModelError(f"{file} is incomplete: {layer[:200]}{missing} is missing")
    return {layer: (found[ends[0]], found[ends[1]]) for layer, found in halves.items()}


class PassSlots:
    """The slots of the rows of the pass under way (rows,); None: no row has an adapter."""

    now: mx.array | None = None


class AdaptedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer, plain or quantised, that adapters change.

    Args:
        linear: the layer.
        lora_a: (slots, inputs, rank).
        lora_b: (slots, rank, outputs), multiplied by the scales.
        slots: of the rows.
    """

    def __init__(
        self, linear: nn.Module, lora_a: mx.array, lora_b: mx.array, slots: PassSlots
    ) -> None:
        super().__init__()
        self.linear = linear
        self.lora_a, self.lora_b = lora_a, lora_b
        self._slots = slots

    def __call__(self, x: mx.array) -> mx.array:
        """Return the layer's output for x (rows, …, inputs)."""
        y: mx.array = self.linear(x)
        slots = self._slots.now
        if slots is None:
            return y
        if x.shape[0] != slots.size:
            raise ValueError("a layer with an adapter does not see its input row by row")
        by_row = x.reshape(x.shape[0], -1, x.shape[-1])
        change = (by_row @ self.lora_a[slots]) @ self.lora_b[slots]
        return y + change.reshape(y.shape).astype(y.dtype)


class AdaptedModel:
    """A model whose passes take `adapters`: the slots of their rows.

    Args:
        model: its layers look at `slots`.
        slots: of the pass under way.
    """

    def __init__(self, model: Any, slots: PassSlots) -> None:
        self._model = model
        self._slots = slots

    def __call__(
        self, tokens: mx.array, *args: Any, adapters: mx.array | None = None, **named: Any
    ) -> Any:
        """Return the model's logits for these tokens."""
        self._slots.now = adapters
        try:
            return self._model(tokens, *args, **named)
        finally:
            self._slots.now = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def adapters_of(rows: Sequence[RowDraws]) -> dict[str, mx.array]:
    """Return what a pass over rows takes besides its cache: nothing if none has an adapter."""
    slots = [row.adapter for row in rows]
    return {"adapters": mx.array(slots)} if any(slots) else {}


def path_of(tokens: list[int], slot: int) -> list[int]:
    """Return ids by which the prefix cache knows the tokens of a row.

    Caches differ between adapters, so each has first ids of its own.
    """
    return [tokens[0] - slot * FIRST_IDS, *tokens[1:]] if slot and tokens else tokens


def adapt(model: Any, adapters: Sequence[Adapter]) -> AdaptedModel:
    """Load adapters into a model that is in memory, and try each in a pass; on the current stream.

    Raises:
        BadModelError: one does not belong to this model; names it.
        MemoryError: not enough memory now.
    """
    layers: dict[str, Any] = dict(model.named_modules())
    loaded = [_load(adapter, layers) for adapter in adapters]
    slots = PassSlots()
    for layer in dict.fromkeys(layer for one in adapters for layer in one.pairs):
        pairs = [one.pop(layer, None) for one in loaded]
        _replace(layers, layer, AdaptedLinear(layers[layer], *_stacks(pairs), slots))
    adapted = AdaptedModel(model, slots)
    for slot, adapter in enumerate(adapters, 1):
        with blaming_the_model(f"adapter {adapter.name}"):
            tokens = mx.zeros((1, 3), mx.int32)
            mx.eval(adapted(tokens, cache=make_prompt_cache(model), adapters=mx.array([slot])))
    return adapted


Pair = tuple[mx.array, mx.array]


def _load(adapter: Adapter, layers: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the matrices (inputs, rank) and (rank, outputs) of each layer, in memory."""
    said = f"adapter {adapter.name}: {adapter.file}"
    try:
        arrays: dict[str, mx.array] = dict(mx.load(str(adapter.file)))  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise_if_memory(error)
        raise BadModelError(f"{said}: {shorten(error)}") from error
    found: dict[str, Pair] = {}
    for layer, (name_a, name_b) in adapter.pairs.items():
        linear = layers.get(layer)
        if linear is None:
            raise BadModelError(f"{said} changes {layer[:200]}, which this model does not have")
        if not isinstance(linear, nn.Linear | nn.QuantizedLinear):
            kind = type(linear).__name__
            raise BadModelError(
                f"{said} changes {layer}, a {kind}; adapters change linear layers alone; {MERGE}"
            )
        inputs, outputs, dtype = _form(linear)
        a, b = arrays[name_a], arrays[name_b]
        if adapter.is_peft:
            a, b = a.T, b.T
        if a.shape[-1] != adapter.rank or b.shape[0] != adapter.rank:
            raise BadModelError(
                f"{said}: {layer} has the rank {a.shape[-1]}, but {ADAPTER_CONFIG} says"
                f" {adapter.rank}"
            )
        if a.shape != (inputs, adapter.rank) or b.shape != (adapter.rank, outputs):
            raise BadModelError(
                f"{said}: {layer} is for {a.shape[0]} inputs and {b.shape[-1]} outputs; this model"
                f" has {inputs} and {outputs}, so it is an adapter of another model"
            )
        scaled = b.astype(mx.float32) * adapter.scale
        found[layer] = a.astype(dtype), scaled.astype(dtype)
    matrices = [one for pair in found.values() for one in pair]
    try:
        mx.eval(matrices)
        are_numbers = mx.all(mx.stack([mx.all(mx.isfinite(one)) for one in matrices])).item()
    except (RuntimeError, ValueError) as error:
        raise_if_memory(error)
        raise BadModelError(f"{said}: {shorten(error)}") from error
    if not are_numbers:
        raise BadModelError(f"{said} holds values that are not numbers (NaN)")
    return found


def _form(linear: nn.Module) -> tuple[int, int, mx.Dtype]:
    """Return the inputs and outputs of a linear layer, and the type that it computes in."""
    outputs, inputs = linear.weight.shape
    if not isinstance(linear, nn.QuantizedLinear):
        return inputs, outputs, linear.weight.dtype
    scales: mx.Dtype = linear.scales.dtype
    dtype = scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16
    return inputs * 32 // linear.bits, outputs, dtype


def _stacks(pairs: Sequence[Pair | None]) -> Pair:
    """Return the matrices of a layer for all slots, the first of which is zeros."""
    some_a, some_b = next(pair for pair in pairs if pair is not None)
    rank = max(pair[0].shape[1] for pair in pairs if pair is not None)
    inputs, outputs = some_a.shape[0], some_b.shape[1]
    no_a, no_b = mx.zeros((inputs, rank), some_a.dtype), mx.zeros((rank, outputs), some_b.dtype)
    all_a, all_b = [no_a], [no_b]
    for pair in pairs:
        a, b = pair or (no_a, no_b)
        missing = rank - a.shape[1]
        all_a.append(mx.pad(a, [(0, 0), (0, missing)]))
        all_b.append(mx.pad(b, [(0, missing), (0, 0)]))
    stacks = mx.stack(all_a), mx.stack(all_b)
    mx.eval(stacks)
    return stacks


def _replace(layers: Mapping[str, Any], name: str, by: nn.Module) -> None:
    """Put another module into the place of a layer."""
    above, _, last = name.rpartition(".")
    while above not in layers:  # a list has no name of its own
        above, _, part = above.rpartition(".")
        last = f"{part}.{last}"
    place: Any = layers[above]
    *parts, last = last.split(".")
    for part in parts:
        place = place[int(part) if isinstance(place, list) else part]
    place[int(last) if isinstance(place, list) else last] = by
