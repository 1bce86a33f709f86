"""Picture files as ids and arrays, beside the owner thread: no MLX here.

mlx-vlm's processors know how a family cuts a picture into tokens. They make arrays of MLX at their
end, which only the owner thread may; they are loaded so that they leave numpy's.
"""

from __future__ import annotations

import hashlib
import io
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np

from mlxsup.protocol.errors import RemoteError, unfit
from mlxsup.protocol.pictures import declares_vision

from ...engine import Picture
from ...rows import check_prompt
from .folder import ModelFolder

NO_TOWER = "send text"
NO_EXTRA = "pip install 'mlxsup[vision]' and load the model again, or send text"

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is opened, by PIL's names; others may run programs or have parts in other files."""

MAX_PIXELS = 89_478_485
"""What PIL takes for a bomb, as one opened picture needs three bytes for each."""

PROBE_TEXT = "probe"


def has_vision_tower(folder: ModelFolder) -> bool:
    """True if a folder has a vision tower that is known here, with its weights."""
    return declares_vision(folder.config) and any("vis" in name for name in folder.shard_of)


def is_installed() -> bool:
    """True if the extra is there."""
    return find_spec("mlx_vlm") is not None


def load_processor(folder: ModelFolder) -> Any:
    """Return the processor of a model with a vision tower.

    Raises:
        Exception: of the libraries; the folder's files are not what they expect.
    """
    import_module(f"mlx_vlm.models.{folder.config['model_type']}")  # registers its processor
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder.path)
    # No parameter leaves numpy's arrays: whatever `return_tensors` says, these processors end with
    # `BatchFeature(data=to_mlx(…))`, and without their ends each family's cutting would be ours.
    for part in (processor, getattr(processor, "image_processor", None)):
        module = sys.modules[type(part).__module__]
        if hasattr(module, "to_mlx"):
            module.to_mlx = dict  # type: ignore[attr-defined]
    return processor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPicture:
    """A picture by itself: as `Picture`, without its place."""

    tokens: tuple[int, ...]
    digest: bytes
    arrays: Mapping[str, Any]


class PictureReader:
    """Reads picture files for one model; for any helper thread.

    Attributes:
        placeholder: the text with which the model's template shows a picture.

    Args:
        processor: the model's.
        encode: tokenises text as a rendered prompt is tokenised.
        render: renders messages with the model's template; may raise anything.
        context: tokens of prompt and answer together, at most.
    """

    def __init__(
        self,
        processor: Any,
        encode: Callable[[str], list[int]],
        render: Callable[[list[dict[str, Any]]], str],
        context: int,
    ) -> None:
        self._processor = processor
        self._context = context
        self._in_use = threading.Lock()
        self.placeholder = _find_placeholder(processor, render)
        self._mark = tuple(encode(self.placeholder))

    def read_all(self, files: Sequence[tuple[str, bytes]], *, counts: bool) -> list[ReadPicture]:
        """Return the ids and arrays of the pictures of a prompt, as many as its context may hold:
        files of a few bytes may have 400 MB of arrays each.

        Args:
            files: each with its place in the request.
            counts: whether the tokens are only counted; there are no arrays then.

        Raises:
            RemoteError: `context_length_exceeded`; or see `read`.
        """
        pictures: list[ReadPicture] = []
        length = 0
        for at, data in files:
            one = self.read(at, data)
            length += len(one.tokens)
            if not counts:
                check_prompt(length, self._context, self._context)
            pictures.append(replace(one, arrays={}) if counts else one)
        return pictures

    def read(self, at: str, data: bytes) -> ReadPicture:
        """Return the ids and arrays of a picture.

        Args:
            at: its place in the request, for the error.
            data: the file.

        Raises:
            RemoteError: `invalid_request`; it cannot be opened, or the model cannot take it.
        """
        image = open_picture(at, data)
        try:
            with self._in_use:
                made = self._processor(
                    text=[self.placeholder],
                    images=[image],
                    add_special_tokens=False,
                    return_tensors="np",
                )
        except MemoryError:
            raise
        except Exception as error:
            # Sizes and shapes that a family cannot cut into patches: the request's own fault.
            said = " ".join(str(error).split())[:200]
            raise unfit(at, f"{at}: this model cannot take such a picture: {said}") from error
        arrays = {
            name: _as_numpy(value)
            for name, value in dict(made).items()
            if name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        }
        tokens = tuple(int(token) for token in np.asarray(made["input_ids"]).reshape(-1))
        return ReadPicture(tokens=tokens, digest=hashlib.sha256(data).digest(), arrays=arrays)

    def alone(self, data: bytes) -> Picture:
        """Return a picture that is a prompt by itself."""
        one = self.read("picture", data)
        return Picture(begin=0, tokens=one.tokens, digest=one.digest, arrays=one.arrays)

    def place(
        self, tokens: Sequence[int], pictures: Sequence[ReadPicture]
    ) -> tuple[list[int], tuple[Picture, ...], Callable[[int], int]]:
        """Put pictures in the places of a prompt that stand for them.

        Args:
            tokens: of the prompt, each picture as its placeholder.
            pictures: in order.

        Returns:
            The tokens, the pictures in their places, and a function from a number of first tokens
            to the number that they are now.

        Raises:
            RemoteError: `invalid_request`; there are more or fewer places than pictures.
        """
        mark, width = self._mark, len(self._mark)
        begins: list[int] = []
        for at in range(len(tokens) - width + 1):
            if tokens[at] == mark[0] and tuple(tokens[at : at + width]) == mark:
                begins.append(at)
        soft = {Counter(picture.tokens).most_common(1)[0][0] for picture in pictures}
        said = Counter(tokens)
        spare = sum(said[token] - mark.count(token) * len(pictures) for token in soft)
        if len(begins) != len(pictures) or spare:
            raise unfit(
                "messages",
                f"the text has {self.placeholder!r} or a part of it, with which this model marks a"
                " picture: leave it out",
            )
        if begins and begins[-1] + width == len(tokens):
            raise unfit("messages", "a prompt must not end with a picture: end with text")
        result: list[int] = []
        placed = []
        done = 0
        for begin, one in zip(begins, pictures, strict=True):
            result += tokens[done:begin]
            placed.append(
                Picture(begin=len(result), tokens=one.tokens, digest=one.digest, arrays=one.arrays)
            )
            result += one.tokens
            done = begin + width
        grown = [0, *accumulate(len(one.tokens) - width for one in pictures)]

        def moved(count: int) -> int:
            return count + grown[sum(begin + width <= count for begin in begins)]

        return [*result, *tokens[done:]], tuple(placed), moved


def open_picture(at: str, data: bytes) -> Any:
    """Return the picture in a file, upright, in RGB, on white where it is transparent; of a moving
    one the first frame.

    Raises:
        RemoteError: `invalid_request`, which names the place and what is wrong.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_large(at) from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        names = "PNG, JPEG, WebP, GIF or BMP"
        raise unfit(at, f"{at}: the file is no picture that can be opened; send {names}") from None
    width, height = image.size
    if not width or not height:
        raise unfit(at, f"{at}: the picture is {width} x {height} pixels; send one that shows some")
    if width * height > MAX_PIXELS:
        raise _too_large(at)
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits of grey, of which PIL keeps the lower ones
            shades = np.asarray(image).astype(np.uint32) >> 8
            image = Image.fromarray(np.minimum(shades, 255).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            page = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(page, image)
        return image.convert("RGB")
    except MemoryError:
        raise
    except Exception as error:
        # PIL's decoders raise whatever a damaged file makes them raise.
        said = " ".join(str(error).split())[:200]
        raise unfit(at, f"{at}: the picture is damaged or not whole: {said}") from error


def probe_picture() -> bytes:
    """Return a small picture, which is not square: it shows whether a model can take any."""
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((96, 64)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def _too_large(at: str) -> RemoteError:
    return unfit(at, f"{at}: a picture has at most {MAX_PIXELS:,} pixels; send a smaller one")


def _as_numpy(value: Any) -> Any:
    """Return an array of numpy; what is neither an array nor a list stays."""
    return np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else value


def _find_placeholder(processor: Any, render: Callable[[list[dict[str, Any]]], str]) -> str:
    """Return how a template shows a picture: what it puts before a text that follows one.

    A template that knows no parts leaves it to the processor.
    """
    text = {"type": "text", "text": PROBE_TEXT}
    try:
        alone = render([{"role": "user", "content": [text]}])
        shown = render([{"role": "user", "content": [{"type": "image"}, text]}])
    except Exception:  # noqa: BLE001  the template is the model's program
        alone = shown = ""
    same = next((n for n, pair in enumerate(zip(alone, shown)) if pair[0] != pair[1]), 0)  # noqa: B905
    found = shown[same : shown.find(PROBE_TEXT, same)] if same else ""
    for name in ("boi_token", "image_token"):
        found = found.strip() or str(getattr(processor, name, None) or "")
    return found


def prefix_ids(tokens: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
    """Return a prompt's ids for the prefix cache: those of a picture follow from its file, and are
    negative, so that two pictures never share what was computed of one."""
    result = list(tokens)
    for picture in pictures:
        words = np.frombuffer(picture.digest, dtype="<u4") >> 1
        count = len(picture.tokens)
        marks = -1 - np.resize(words, count).astype(np.int64)
        result[picture.begin : picture.end] = marks.tolist()
    return result
