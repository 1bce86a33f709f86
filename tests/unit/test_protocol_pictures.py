"""Pictures in messages: what is taken and what is refused, before any worker opens them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.client import pictures as client_pictures
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import decode_body, encode_body
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.pictures import MAX_IMAGE_BYTES, MAX_IMAGES
from mlxsup.worker.text.chat_messages import PICTURE, with_picture_marks, without_media

Part = dict[str, Any]
LOOK: Part = {"type": "text", "text": "look"}


def _image(data: Any = b"file", **more: Any) -> Part:
    return {"type": "image", "data": data, **more}


def _chat(*parts: Part, role: str = "user") -> RequestBody:
    return RequestBody(messages=[{"role": role, "content": list(parts)}])


def test_bytes_of_pictures_come_through_the_wire_as_they_are() -> None:
    sent = _chat(LOOK, _image(bytes(range(256))))
    assert decode_body(encode_body(sent)) == sent


@pytest.mark.parametrize("role", ["user", "tool"])
def test_users_and_tools_may_show_as_many_pictures_as_the_limit_says(role: str) -> None:
    _chat(*[_image()] * MAX_IMAGES, role=role)
    _chat(_image(bytes(MAX_IMAGE_BYTES)), role=role)


@pytest.mark.parametrize(
    ("parts", "role", "said"),
    [
        ([_image()] * (MAX_IMAGES + 1), "user", r"messages must .* 50 pictures, not one with 51"),
        ([LOOK, _image(bytes(MAX_IMAGE_BYTES + 1))], "user",
         r"messages\[0\]\.content\[1\] must be a picture of at most 20\.0 MiB, not 20\.1 MiB"),
        ([_image(b"")], "user", r"messages\[0\]\.content\[0\] must be .*, not an empty file"),
        ([_image("aGk=")], "user", r"data of messages\[0\]\.content\[0\] must be .*, not text"),
        ([_image(None, at="input[3]")], "tool", r"data of input\[3\] must be .*, not None"),
        ([_image()], "system", r"messages\[0\]\.content\[0\]: .* of the user or of a tool, not of"),
        ([_image()], "assistant", r"not of the assistant"),
    ],
    ids=["51", "20 MiB", "empty", "text", "nothing", "system", "assistant"],
)  # fmt: skip
def test_a_picture_that_cannot_be_shown_is_refused_by_its_place(
    parts: list[Part], role: str, said: str
) -> None:
    with pytest.raises(RemoteError, match=said):
        _chat(*parts, role=role)


def test_a_model_that_takes_text_says_what_to_do_with_a_picture() -> None:
    messages = [{"role": "user", "content": [LOOK, _image()]}]
    with pytest.raises(RemoteError, match=r"content\[1\]: this model does not take images; do so"):
        without_media(messages, "do so")


def test_the_text_of_a_picture_is_a_mark_in_its_place() -> None:
    messages: list[Part] = [
        {"role": "user", "content": [LOOK, _image(b"1"), LOOK]},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": [_image(b"2", at="x")]},
    ]
    marked, files = with_picture_marks(messages)
    mark = {"type": "text", "text": PICTURE}
    assert [one["content"] for one in marked] == [[LOOK, mark, LOOK], "a", [mark]]
    assert files == [("messages[0].content[1]", b"1"), ("x", b"2")]
    assert messages[0]["content"][1] == _image(b"1"), "the caller's are left alone"


def test_a_picture_may_have_as_many_bytes_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_pictures, "MAX_IMAGE_BYTES", 8)
    begin = b"\x89PNG\r\n\x1a\n"
    assert client_pictures.picture_problem(begin) == ""
    assert "of at most" in client_pictures.picture_problem(begin + b"x")
