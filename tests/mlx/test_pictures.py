"""Picture files: what is opened, how, and what is said of the others; models that take none."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from mlxsup.client.pictures import picture_problem
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.worker.engine import Picture
from mlxsup.worker.engines.mlx import pictures
from mlxsup.worker.engines.mlx.pictures import open_picture, prefix_ids

from support.model_types.build import make_model
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import driven_engine, loaded_engine

pytestmark = pytest.mark.mlx

ASK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image", "data": b"x"}, {"type": "text", "text": "?"}]}
]


def _image() -> Any:
    return pytest.importorskip("PIL.Image")


def _saved(image: Any, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _grey(value: int = 90, mode: str = "RGB", size: tuple[int, int] = (12, 8)) -> Any:
    return _image().new("L", size, value).convert(mode)


# ---------------------------------------------------------------- models that take none


def test_a_model_of_text_says_that_it_takes_none(tmp_path: Path) -> None:
    with driven_engine(make_tiny_model(tmp_path)) as driver:
        assert not driver.facts.takes_pictures
        error = driver.answer(messages=ASK, max_tokens=2).error
        assert error is not None
        assert error.message.endswith("this model does not take images; send text")


def test_without_the_extra_a_vision_model_serves_text_and_names_the_extra(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_vl")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": {"depth": 1}}))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights |= {"vision_tower.patch": mx.zeros((2, 2))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    with (
        mock.patch.object(pictures, "is_installed", return_value=False),
        driven_engine(folder) as driver,
    ):
        assert not driver.facts.takes_pictures
        assert len(driver.answer(prompt="a story", max_tokens=4).tokens) == 4
        error = driver.answer(messages=ASK, max_tokens=2).error
        assert error is not None
        assert "pip install 'mlxsup[vision]'" in error.message
        earlier = [*ASK, {"role": "assistant", "content": "a"}]
        later = driver.answer(messages=[*earlier, {"role": "user", "content": "b"}], max_tokens=2)
        assert later.error is None
        assert "[image: not shown]" in later.warnings[0]


def test_a_tower_that_cannot_be_used_leaves_text(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    from support.models.tiny_vision import make_tiny_vision

    folder = make_tiny_vision(tmp_path / "m")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 0}')
    with loaded_engine(folder) as engine:
        assert not engine.facts.takes_pictures
        [warning] = engine.facts.warnings
        assert warning.startswith("it takes no pictures")


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_of_each_format_is_opened(kind: str) -> None:
    opened = open_picture("x", _saved(_grey(), kind))
    assert (opened.mode, opened.size) == ("RGB", (12, 8))
    assert abs(int(np.asarray(opened).mean()) - 90) <= 2


def _moving() -> bytes:
    return _saved(_grey(40), "GIF", save_all=True, append_images=[_grey(200), _grey(220)])


def _lying() -> bytes:
    exif = _image().Exif()
    exif[0x0112] = 6  # a camera that was turned
    return _saved(_grey(), "JPEG", exif=exif)


def _deep_grey() -> bytes:
    return _saved(_image().fromarray(np.full((8, 12), 90 << 8, dtype=np.uint16)), "PNG")


@pytest.mark.parametrize(
    ("make", "shade", "size"),
    [
        (_moving, 40, (12, 8)),
        (_lying, 90, (8, 12)),
        (_deep_grey, 90, (12, 8)),
        (lambda: _saved(_image().new("CMYK", (12, 8), (0, 0, 0, 165)), "JPEG"), 90, (12, 8)),
        (lambda: _saved(_image().new("RGBA", (12, 8), (0, 0, 0, 0)), "PNG"), 255, (12, 8)),
        (lambda: _saved(_grey(mode="P"), "PNG"), 90, (12, 8)),
    ],
    ids=["moving", "turned", "16 bits", "CMYK", "transparent", "palette"],
)
def test_a_picture_is_shown_as_people_see_it(
    make: Callable[[], bytes], shade: int, size: tuple[int, int]
) -> None:
    opened = open_picture("x", make())
    assert (opened.mode, opened.size) == ("RGB", size)
    assert abs(int(np.asarray(opened).mean()) - shade) <= 3


def _png_of(width: int, height: int) -> bytes:
    """A PNG with this size in its header, and one line of it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(1 + 3 * min(width, 10)))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: b"no picture at all", "no picture that can be opened"),
        (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no picture that can be opened"),
        (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture that can be"),
        (lambda: b"%PDF-1.7\n", "PNG, JPEG, WebP, GIF or BMP"),
        (lambda: _saved(_grey(), "PNG")[:20], "no picture that can be opened"),
        (lambda: _saved(_grey(size=(200, 200)), "JPEG")[:700], "damaged or not whole"),
        (lambda: _png_of(0, 8), "no picture|0 x 8"),
        (lambda: _png_of(10_000, 9_000), "89,478,485 pixels; send a smaller one"),
        (lambda: _png_of(60_000, 60_000), "has at most 89,478,485 pixels"),
    ],
    ids=["none", "svg", "eps", "pdf", "header cut", "cut", "no width", "large", "bomb"],
)
@pytest.mark.filterwarnings("ignore:Image size:RuntimeWarning")  # PIL may be absent
def test_a_file_that_shows_nothing_is_refused_by_its_place(
    make: Callable[[], bytes], said: str
) -> None:
    _image()
    with pytest.raises(RemoteError, match=said) as caught:
        open_picture("messages[0].content[1]", make())
    assert caught.value.message.startswith("messages[0].content[1]: ")
    assert caught.value.detail["parameter"] == "messages[0].content[1]"


def test_ids_of_pictures_follow_from_their_files_and_are_no_tokens() -> None:
    def shown(begin: int, digest: int) -> Picture:
        return Picture(begin=begin, tokens=(5,) * 20, digest=bytes([digest]) * 32, arrays={})

    tokens = [1, 2, *[5] * 20, 3]
    one, same, other = (prefix_ids(tokens, [shown(2, n)]) for n in (7, 7, 8))
    assert one == same
    assert [one[at] == other[at] for at in range(len(tokens))] == [True] * 2 + [False] * 20 + [True]
    assert all(-(2**31) <= mark < 0 for mark in one[2:-1])
    assert prefix_ids(tokens, []) == tokens


# ---------------------------------------------------------------- prompts


def test_what_a_prompt_with_pictures_cannot_have_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    from support.models.tiny_vision import FAMILIES, asked, make_tiny_vision, picture

    file = picture(1)
    with loaded_engine(make_tiny_vision(tmp_path / "m")) as engine:
        assert engine.text.encode(RequestBody(messages=[asked("<|image_pad|> is a mark")]))
        typed = RequestBody(messages=[asked("what is <|image_pad|>", file)])
        assert len(engine.text.encode(typed).pictures) == 1, "what a user types is text"

        def ordered(text: str) -> dict[str, Any]:
            return {"messages": [{"role": "system", "content": text}, asked("?", file)]}

        cases: list[tuple[str, dict[str, Any]]] = [
            ("leave it out", ordered("what is <|image_pad|>")),
            ("leave it out", ordered(FAMILIES["qwen3_vl"].shown)),
            ("cannot take such a picture", {"messages": [asked("?", picture(1, (900, 2)))]}),
            ("cannot be shown", {"messages": [asked("?", file)], "echo": True}),
            ("content\\[0\\]: the file is no picture", {"messages": [asked("?", b"x")]}),
        ]  # fmt: skip
        for said, values in cases:
            with pytest.raises(RemoteError, match=said):
                engine.text.encode(RequestBody(**values))
        counted = RequestBody(messages=[asked("?", file)], tokenize={"ids": True})
        assert len(engine.text.encode(counted).tokens) > 8


def test_no_more_pictures_are_read_than_the_context_holds(tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm")
    from support.models.tiny_vision import asked, make_tiny_vision, picture

    files = [picture(number, (64, 64)) for number in range(8)]  # of 16 tokens and two marks
    folder = make_tiny_vision(tmp_path / "m")
    read = pictures.PictureReader.read
    with (
        loaded_engine(folder, context_length=50) as engine,
        mock.patch.object(pictures.PictureReader, "read", autospec=True, side_effect=read) as calls,
    ):
        with pytest.raises(RemoteError, match="prompt is too long: 54 tokens > 50;") as refused:
            engine.text.encode(RequestBody(messages=[asked("?", *files)]))
        assert refused.value.code == "context_length_exceeded"
        assert calls.call_count == 3
        counted = RequestBody(messages=[asked("?", *files)], tokenize={"ids": False})
        found = engine.text.encode(counted)
    assert len(found.tokens) > 8 * 18
    assert [dict(one.arrays) for one in found.pictures] == [{}] * 8


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_worker_opens_what_the_doors_send_and_no_more(kind: str) -> None:
    data = _saved(_grey().convert("P") if kind == "GIF" else _grey(), kind)
    if picture_problem(data):
        assert kind == "TIFF"
        with pytest.raises(RemoteError):
            open_picture("messages[0].content[0]", data)
    else:
        open_picture("messages[0].content[0]", data)
