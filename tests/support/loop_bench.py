"""A step loop with a scripted engine, link and text side around it; no process, socket or sleep."""

from collections import deque
from collections.abc import Callable

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode_body
from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    MessageToWorker,
    Resume,
    Step,
)
from mlxsup.worker.engine import Row, StepResult, TextCodec
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.loop import StepLoop
from mlxsup.worker.text_threads import Refused, Tokenised

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
    fake={"prefill_tokens_per_step": 8},
)


class RecordingEngine(FakeEngine):
    """The fake engine, noting each call in the shared story."""

    def __init__(self, story: list[str]) -> None:
        super().__init__(SPEC)
        self.story = story
        self.settled_after: list[str] = []

    def insert(self, row: Row) -> int:
        self.story.append(f"insert {row.key}")
        return super().insert(row)

    def give_back(self, *, keeps_prefixes: bool = False) -> None:
        self.story.append("free" if keeps_prefixes else "give back")

    def remove(self, *keys: RequestKey) -> None:
        self.story.append(" ".join(["remove", *map(str, keys)]))
        super().remove(*keys)

    def step(self) -> StepResult:
        self.story.append("step")
        return super().step()

    def settle(self) -> None:
        self.settled_after.append(self.story[-1])


class MemoryLink:
    """A link in memory; `is_blocked` is a supervisor that does not read."""

    def __init__(self, story: list[str]) -> None:
        self.story = story
        self.inbox: deque[MessageToWorker] = deque()
        self.outbox: list[Message] = []
        self.sent = self.received = 0
        self.is_blocked = False
        self.waits = 0
        self.on_wait: Callable[[], object] = lambda: None
        self.waited_s: float | None = None

    def receive(self) -> MessageToWorker | None:
        if not self.inbox:
            return None
        self.received += 1
        return self.inbox.popleft()

    def send(self, message: Message) -> None:
        self.story.append(f"send {message.TYPE}")
        self.sent += 1
        self.outbox.append(message)

    def flush(self) -> bool:
        return not self.is_blocked

    def wait(self, timeout_s: float | None) -> None:
        self.waits += 1
        self.waited_s = timeout_s
        self.on_wait()


class ScriptedText:
    """Prepares when told to."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.pending: dict[RequestKey, bytes] = {}
        self.results: list[Tokenised | Refused] = []
        self.busy_since: float | None = None
        self.has_threads = True

    def submit(self, key: RequestKey, body: bytes, resume: Resume | None = None) -> None:
        self.pending[key] = body

    def forget(self, key: RequestKey) -> None:
        pass  # it has begun: the result still comes

    def take(self) -> list[Tokenised | Refused]:
        results, self.results = self.results, []
        return results

    def busy(self) -> tuple[RequestKey, float] | None:
        return None if self.busy_since is None else (RequestKey(1), self.busy_since)

    def is_alive(self) -> bool:
        return self.has_threads

    def prepare(self) -> None:
        for key, _ in self.pending.items():
            body = RequestBody(prompt="p" * 3, max_tokens=BUDGETS.get(key, 5), stop=STOPS.get(key))
            prompt = self.codec.encode(body)
            self.results.append(Tokenised(key=key, body=body, prompt=prompt, tokenize_s=0.0))
        self.pending.clear()


BUDGETS: dict[int, int] = {}


STOPS: dict[int, list[str]] = {}


class Bench:
    """A loop with everything around it."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.engine = RecordingEngine(self.story)
        facts = self.engine.load(lambda phase, progress: None)
        self.link = MemoryLink(self.story)
        self.text = ScriptedText(self.engine.text)
        self.board = Board(clock=lambda: 0.0)
        self.now = 0.0
        self.loop = StepLoop(
            engine=self.engine,
            facts=facts,
            link=self.link,
            text=self.text,
            board=self.board,
            max_concurrency=4,
            step_timeout_s=30.0,
            clock=lambda: self.now,
        )

    def dispatch(self, key: int) -> None:
        body = encode_body(RequestBody(prompt="ppp"))
        self.link.inbox.append(Dispatch(key=RequestKey(key), body=body))

    def cancel(self, key: int) -> None:
        self.link.inbox.append(CancelRow(key=RequestKey(key)))

    def start(self, *keys: int) -> None:
        """Dispatches and prepares, so that the next turn inserts."""
        for key in keys:
            self.dispatch(key)
        self.loop.drain()
        self.text.prepare()

    def run(self) -> None:
        """Runs the loop until it has waited once."""
        waits = self.link.waits
        self.loop.run(lambda: self.link.waits > waits)

    def steps(self) -> list[Step]:
        return [message for message in self.link.outbox if isinstance(message, Step)]

    def finishes(self) -> dict[int, FinishReason]:
        return {row.key: row.finish for s in self.steps() for row in s.rows if row.finish}
