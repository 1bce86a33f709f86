"""Embeddings and reranking: which models do that, as their folders say, and what is asked of them.

Such a model reads texts and writes none. A request is a list of texts, and each is answered with a
vector: its embedding, or one number that says how well it answers a query. The vectors travel as
the tokens of an answer do, and where a token would have its id they have the number of their text:
so a request that is resumed runs what has not been answered again, and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from .errors import check_encodable, invalid, unfit, unknown
from .regular_file import MIB, read_regular
from .tasks import Task

MAX_TEXTS = 2048
"""As many as OpenAI takes in one request."""

MAX_DIMENSIONS = 2**16
MAX_INPUT_TYPE = 64
MAX_JSON_BYTES = MIB

# ---------------------------------------------------------------- what a folder says


class Mode(StrEnum):
    """The way in which the vectors of a text's tokens become one."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"


YES_NO = "yes_no"
"""The value of `pooling` for a decoder that ranks by its yes and no, as Qwen3-Reranker does."""

ENCODERS = ("bert", "modernbert", "nomic_bert", "roberta", "xlm-roberta")
"""Types of models that see all of a text at once, and write none."""

_MODES = {
    "pooling_mode_cls_token": Mode.CLS,
    "pooling_mode_mean_tokens": Mode.MEAN,
    "pooling_mode_lasttoken": Mode.LAST,
}
_MODE_NAMES = {"cls": Mode.CLS, "mean": Mode.MEAN, "lasttoken": Mode.LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The treatment of the vectors of a text's tokens.

    Attributes:
        task: `embed` or `rerank`.
        mode: which vectors count.
        normalises: whether the result has length 1.
        max_tokens: of a text, as the folder says; None: as many as config.json declares.
        dense: folders of layers after the pooling, in order, by their names.
        prompts: what stands before a text, by the kind of text.
        default_prompt: the kind of a text without one; empty: nothing stands before it.
        lowercases: whether texts are written in small letters first.
        answers: of a decoder that ranks by the token that it would write next: the token, or the
            word, that says that a document fits, and then the one that says that it does not;
            empty: the model has a layer for scores.
        problem: why the model cannot be served, a sentence; empty if it can.
    """

    task: Task
    mode: Mode = Mode.MEAN
    normalises: bool = True
    max_tokens: int | None = None
    dense: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lowercases: bool = False
    answers: tuple[int | str, ...] = ()
    problem: str = ""


def find_pooling(folder: Path, config: Mapping[str, Any], asked: str = "") -> Pooling | None:
    """Return how a model pools, from its folder; None: it writes text, as far as the folder says.

    Files that cannot be read say nothing, as if they were not there.

    Args:
        folder: of the model.
        config: what its config.json holds.
        asked: `pooling` of the model's entry; empty: as the folder says.
    """
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    is_encoder = config.get("model_type") in ENCODERS
    modules = _json(folder / "modules.json")
    modules = modules if isinstance(modules, list) else []
    if asked == YES_NO:
        return _by_answers(folder, ("yes", "no"))
    if architecture.endswith("ForSequenceClassification"):
        labels = config.get("id2label")
        count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
        problem = "" if count == 1 else f"it sorts texts into {count} classes, and ranks none"
        mode = Mode.MEAN if config.get("classifier_pooling") == "mean" else Mode.CLS
        if not is_encoder:
            mode = Mode.LAST
        return Pooling(
            task=Task.RERANK,
            mode=mode,
            normalises=False,
            max_tokens=_places(config),
            problem=problem,
        )
    if not asked and (place := _place_of("LogitScore", modules)) is not None:
        return _by_answers(folder, _answers_in(_object(folder / place / "config.json")))
    if not asked and not modules and _is_qwen_reranker(folder, config):
        return _by_answers(folder, ("yes", "no"))
    if not (is_encoder or modules or asked):
        return None
    found = _of_modules(folder, modules)
    lengths = [length for length in (found.max_tokens, _places(config)) if length is not None]
    found = replace(found, max_tokens=min(lengths, default=None))
    return replace(found, mode=Mode(asked), problem="") if asked else found


def _is_qwen_reranker(folder: Path, config: Mapping[str, Any]) -> bool:
    """True if the name says so: the files of Qwen3-Reranker are those of a model that chats."""
    repository = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    names = f"{folder.name} {repository}".lower()
    return config.get("model_type") == "qwen3" and "reranker" in names


def _by_answers(folder: Path, answers: tuple[int | str, ...]) -> Pooling:
    found = _of_modules(folder, [])
    problem = "" if answers else "its LogitScore names no token"
    return replace(
        found,
        task=Task.RERANK,
        mode=Mode.LAST,
        normalises=False,
        answers=answers,
        problem=problem,
    )


def _answers_in(settings: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the tokens that the settings of a LogitScore name; none if they are wrong."""
    fits, fits_not = settings.get("true_token_id"), settings.get("false_token_id")
    given = [fits] if fits_not is None else [fits, fits_not]
    tokens = tuple(one for one in given if type(one) is int and one >= 0)
    return tokens if len(tokens) == len(given) else ()


def _kind_of(module: object) -> str:
    """Return the name of a module's class; empty: it is none."""
    return str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""


def _place_of(kind: str, modules: Sequence[Any]) -> str | None:
    """Return the folder of the first module of a kind, within that of the model."""
    found = (str(one.get("path", "")) for one in modules if _kind_of(one) == kind)
    return next((place for place in found if "/" not in place and ".." not in place), None)


def _places(config: Mapping[str, Any]) -> int | None:
    """Return how many places for tokens RoBERTa uses of those that it declares: it leaves out the
    first ones. None: of other types, all."""
    if config.get("model_type") not in ("roberta", "xlm-roberta"):
        return None
    places, padding = config.get("max_position_embeddings"), config.get("pad_token_id")
    first = (padding if type(padding) is int else 1) + 1
    return places - first if type(places) is int and places > first else None


def _of_modules(folder: Path, modules: Sequence[Any]) -> Pooling:
    """Return what the files of sentence-transformers say; without them the mean is taken."""
    values: dict[str, Any] = {"normalises": not modules}
    dense = []
    for module in modules:
        kind = _kind_of(module)
        place = str(module.get("path", "")) if kind else ""
        match kind:
            case "Transformer" | "Dropout":
                pass
            case "Pooling":
                values |= _of_pooling(_object(folder / place / "config.json"))
            case "Normalize":
                values["normalises"] = True
            case "Dense" if "/" not in place and place not in ("", "..", "."):
                dense.append(place)
            case _:
                values["problem"] = f"modules.json has a {kind or 'part without a type'}"
    sizes = _object(folder / "sentence_bert_config.json")
    said = _object(folder / "config_sentence_transformers.json")
    prompts = said.get("prompts")
    most = sizes.get("max_seq_length")
    return Pooling(
        task=Task.EMBED,
        max_tokens=most if type(most) is int and most > 0 else None,
        lowercases=sizes.get("do_lower_case") is True,
        dense=tuple(dense),
        prompts={str(name): str(text) for name, text in prompts.items() if isinstance(text, str)}
        if isinstance(prompts, dict)
        else {},
        default_prompt=str(said.get("default_prompt_name") or ""),
        **values,
    )


def _of_pooling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mode that the settings of a pooling name."""
    name = settings.get("pooling_mode")
    names = [name] if isinstance(name, str) else name if isinstance(name, list) else []
    on = [mode for mode, value in settings.items() if mode in _MODES and value is True]
    others = [
        mode
        for mode, value in settings.items()
        if mode.startswith("pooling_mode_") and value is True and mode not in _MODES
    ]
    others += [str(one) for one in names if one not in _MODE_NAMES]
    modes = {*(_MODES[one] for one in on), *(_MODE_NAMES[n] for n in names if n in _MODE_NAMES)}
    if others or len(modes) > 1:
        shown = ", ".join(sorted([*others, *(mode.value for mode in modes)]))
        return {"problem": f"it pools in another way than by mean, cls or last ({shown[:100]})"}
    problem = "its pooling leaves out the prompt" if settings.get("include_prompt") is False else ""
    return {"mode": next(iter(modes), Mode.MEAN), "problem": problem}


def _json(path: Path) -> Any:
    try:
        return json.loads(read_regular(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _object(path: Path) -> dict[str, Any]:
    value = _json(path)
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingBody:
    """The request of a client to a model that embeds or reranks: the body of `Generate` in that
    case.

    A field that is None was left out.

    Attributes:
        texts: what to embed, or the documents to rank: texts, or lists of token ids, which are used
            as they are.
        query: what the documents are ranked for; None: the texts are embedded.
        dimensions: how many of the first numbers of each embedding to return, for models that
            allow it; they are normalised again.
        input_type: the kind of text, which says what the model's makers put before it: `query`,
            `document`, or another one that they name.
        truncate: whether a text that is too long is cut; otherwise it is refused.
    """

    texts: list[str | list[int]]
    query: str | None = None
    dimensions: int | None = None
    input_type: str | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(self.texts, list):
            raise invalid("texts", "a list of texts", self.texts, subject=name)
        if not 1 <= len(self.texts) <= MAX_TEXTS:
            shown = f"a list of {len(self.texts)}" if self.texts else "an empty list"
            expected = f"a list of 1 to {MAX_TEXTS} texts"
            raise invalid("texts", expected, subject=name, shown=shown)
        for nth, text in enumerate(self.texts):
            _check_text(text, "texts", f"{name}[{nth}]", is_ranked=self.query is not None)
        if self.query is not None:
            _check_text(self.query, "query", "query", is_ranked=True)
        size = self.dimensions
        if size is not None and not (type(size) is int and 1 <= size <= MAX_DIMENSIONS):
            raise invalid("dimensions", f"an integer from 1 to {MAX_DIMENSIONS}", size)
        kind = self.input_type
        if kind is not None and not (isinstance(kind, str) and 0 < len(kind) <= MAX_INPUT_TYPE):
            raise invalid("input_type", "the name of a kind of text, such as query", kind)
        if self.truncate is not None and not isinstance(self.truncate, bool):
            raise invalid("truncate", "true or false", self.truncate)
        if self.query is not None and (size is not None or kind is not None):
            given = "dimensions" if size is not None else "input_type"
            raise unfit(given, f"{given} has no effect on a ranking: leave it out")

    @property
    def picture_bytes(self) -> int:
        """Return 0: texts have no pictures."""
        return 0

    @property
    def name(self) -> str:
        """Return the name of the texts in an error: as in `Client.embed` and `Client.rerank`."""
        return "texts" if self.query is None else "documents"

    def parameters(self) -> dict[str, Any]:
        """Return how to answer: what a request needs besides its tokens to be resumed."""
        return {} if self.dimensions is None else {"dimensions": self.dimensions}

    @classmethod
    def accepted(cls, tokens: Sequence[int], parameters: Mapping[str, Any]) -> PoolingBody:
        """Return the body of a request that was accepted earlier, with its texts as tokens."""
        begin = 0
        texts: list[str | list[int]] = []
        for length in parameters["lengths"]:
            texts.append(list(tokens[begin : begin + length]))
            begin += length
        return cls(texts=texts, dimensions=parameters.get("dimensions"))

    def to_wire(self) -> dict[str, Any]:
        """Return the map to send: what was given."""
        names = self.__dataclass_fields__
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> PoolingBody:
        """Read what a client sent.

        Raises:
            RemoteError: `invalid_request`, naming the parameter and what was expected.
        """
        given = {name: item for name, item in value.items() if item is not None}
        for name in given.keys() - cls.__dataclass_fields__.keys():
            raise unknown(name, cls.__dataclass_fields__, " beside texts")
        return cls(**given)


def _check_text(text: object, parameter: str, name: str, *, is_ranked: bool) -> None:
    expected = "text" if is_ranked else "text, or a list of token ids"
    if isinstance(text, list) and not is_ranked:
        for token in text:
            if type(token) is not int or not 0 <= token < 2**32:
                raise invalid(parameter, "ids from 0 to 4294967295", token, subject=name)
        if not text:
            raise invalid(
                parameter, "a list of at least one token id", subject=name, shown="an empty list"
            )
        return
    if not isinstance(text, str):
        raise invalid(parameter, expected, text, subject=name)
    check_encodable(parameter, text, subject=name)


# ---------------------------------------------------------------- vectors


def pack_vector(numbers: Sequence[float]) -> bytes:
    """Return a vector as it travels: 32-bit floats, the lowest byte first."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpack_vector(packed: bytes) -> list[float]:
    """Return the numbers of a vector.

    Raises:
        ValueError: its length is not a multiple of four bytes.
    """
    if len(packed) % 4:
        raise ValueError("a vector has four bytes for each number")
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))
