"""The bytes of every message, so that a change of the wire cannot happen unseen.

When a message changes on purpose, raise PROTOCOL_VERSION if older peers would misread it, run
`python tests/unit/test_protocol_golden.py` to write the new bytes, and read the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlxsup.protocol import messages
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.messages import Message
from mlxsup.protocol.states import (
    Batching,
    Channel,
    FinishReason,
    LoadPhase,
    NoticeKind,
    WorkerPhase,
)

GOLDEN = Path(__file__).with_name("golden_messages.json")

ID = RequestId("r-1")
MODEL = ModelName("smollm2")
KEY = RequestKey(7)
ERROR = RemoteError(ErrorCode.UNKNOWN_MODEL, "no such model", detail={"known": ["a"]}).to_wire()

LINKS: dict[str, tuple[tuple[type[Message], ...], list[Message]]] = {
    "client to supervisor": (
        messages.CLIENT_MESSAGES,
        [
            messages.Generate(
                id=ID, model=MODEL, client="me", queue_timeout_s=1.5, timeout_s=60.0, body=b"\x80"
            ),
            messages.Cancel(id=ID),
            messages.Ping(id=ID),
            messages.StatusQuery(id=ID),
            messages.Load(id=ID, model=MODEL),
            messages.Unload(id=ID, model=MODEL),
            messages.Restart(id=ID, model=MODEL, now=True),
            messages.Stop(id=ID, now=True, timeout_s=2.0),
            messages.Subscribe(id=ID),
            messages.Reload(id=ID),
        ],
    ),
    "supervisor to client": (
        messages.SUPERVISOR_TO_CLIENT,
        [
            messages.Deltas(
                deltas=[
                    messages.ClientDelta(
                        id=ID,
                        seq=3,
                        text="héé",
                        tokens=pack_tokens([1, 70000]),
                        channel=Channel.REASONING,
                    )
                ]
            ),
            messages.Notice(
                id=ID, kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"}
            ),
            messages.Done(
                id=ID,
                seq=4,
                finish_reason=FinishReason.STOP,
                usage=messages.Usage(prompt_tokens=3, completion_tokens=4),
                timings=messages.Timings(queued_s=0.25, total_s=2.0),
                seed=11,
            ),
            messages.Failed(id=ID, error=ERROR),
            messages.Reply(id=ID, value={"model": {"name": "smollm2"}}),
            messages.Event(id=ID, value={"model": "smollm2", "to": "READY"}),
            messages.Alive(),
        ],
    ),
    "supervisor to worker": (
        messages.SUPERVISOR_TO_WORKER,
        [
            messages.Dispatch(
                key=KEY,
                resume=messages.Resume(
                    acceptance=messages.Acceptance(
                        prompt_tokens=pack_tokens([1, 2]),
                        opening="<think>",
                        parameters={"max_tokens": 9},
                        seed=5,
                        fingerprint="f",
                    ),
                    delivered=pack_tokens([3]),
                ),
            ),
            messages.CancelRow(key=KEY),
            messages.Exit(),
        ],
    ),
    "worker to supervisor": (
        messages.WORKER_TO_SUPERVISOR,
        [
            messages.Hello(
                model=MODEL, generation=Generation(2), token="t", pid=99, version="0.1.0"
            ),
            messages.LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.5),
            messages.Ready(
                context_length=8192,
                fingerprint="ab",
                backend="cpu",
                versions={"mlx": "0.32.4"},
                active_bytes=5,
                batching=Batching.ONE_ROW,
                batching_reason="rows of different length change each other",
                warnings=["its context length is not declared"],
            ),
            messages.Accepted(
                key=KEY,
                acceptance=messages.Acceptance(
                    prompt_tokens=pack_tokens([1, 2]),
                    opening="",
                    parameters={"temperature": 0.5},
                    seed=11,
                    fingerprint="ab",
                ),
                tokenize_s=0.25,
            ),
            messages.Rejected(key=KEY, error=ERROR),
            messages.Step(
                step=9,
                rows=[
                    messages.RowDelta(
                        key=KEY, text="x", tokens=pack_tokens([5]), finish=FinishReason.LENGTH
                    )
                ],
                prefill=[messages.PrefillProgress(key=RequestKey(8), done=16, total=600)],
            ),
            messages.Heartbeat(step=9, phase=WorkerPhase.DECODE, phase_s=0.5, active_bytes=5),
            messages.Dying(code=70, message="step failed"),
        ],
    ),
}

EXAMPLES = [
    pytest.param(link, message, id=f"{link}: {message.TYPE}")
    for link, (_, examples) in LINKS.items()
    for message in examples
]


def frames_of(message: Message) -> list[str]:
    return [frame.hex() for frame in encode(message)]


@pytest.mark.parametrize("link", LINKS)
def test_every_message_has_an_example(link: str) -> None:
    classes, examples = LINKS[link]
    assert [type(example) for example in examples] == list(classes)


@pytest.mark.parametrize(("link", "message"), EXAMPLES)
def test_the_bytes_are_what_they_were(link: str, message: Message) -> None:
    assert frames_of(message) == json.loads(GOLDEN.read_text())[link][message.TYPE]


@pytest.mark.parametrize(("link", "message"), EXAMPLES)
def test_what_is_encoded_decodes_to_the_same(link: str, message: Message) -> None:
    assert Decoder(LINKS[link][0], is_strict=False).decode(encode(message)) == message


if __name__ == "__main__":
    golden = {
        link: {message.TYPE: frames_of(message) for message in examples}
        for link, (_, examples) in LINKS.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
