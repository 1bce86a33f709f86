"""Whatever happens around them, all who read a stream get the same tokens once and in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Cancel, Deltas, Done, Failed
from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.request_messages import Attach
from mlxsup.protocol.states import Channel, FinishReason, State
from mlxsup.protocol.worker_messages import RowDelta, Step
from mlxsup.supervisor.core.events import ConnectionId

from support.core_driver import Driver
from support.core_looks import ALICE

STEPS = st.lists(
    st.sampled_from(["token", "token", "join", "join", "answer", "leave", "crash", "gone"]),
    max_size=30,
)


@dataclass
class Listener:
    """One of those who have joined, and what it has got."""

    connection: ConnectionId
    tokens: bytes = b""
    pieces: int = 0
    end: Done | Failed | None = None
    is_refused: bool = False


@dataclass
class Case:
    """A stream, its readers, and the worker's questions that have no answer yet."""

    driver: Driver
    key: RequestKey
    sent: bytes = b""
    count: int = 0
    listeners: list[Listener] = field(default_factory=list)
    questions: list[Render] = field(default_factory=list)

    def look(self) -> None:
        """What the latest event has sent."""
        self.questions += self.driver.told(Render)
        for one in self.listeners:
            for message in self.driver.sent_in_order(one.connection):
                assert one.end is None, "something came after the end"
                if isinstance(message, Deltas):
                    for delta in message.deltas:
                        assert delta.seq == one.pieces
                        one.pieces += 1
                        one.tokens += delta.tokens
                elif isinstance(message, Done | Failed):
                    one.end = message
            assert self.sent.startswith(one.tokens)

    def do(self, step: str) -> None:
        driver = self.driver
        match step:
            case "token":
                self.count += 1
                token = pack_tokens([self.count])
                row = RowDelta(key=self.key, text="x", tokens=token)
                self.sent += token
                driver.worker(Step(step=driver.model().steps + 1, rows=[row]))
            case "join":
                connection = ConnectionId(f"c{len(self.listeners)}".encode())
                self.listeners.append(Listener(connection))
                request = Attach(id=RequestId("join"), request=RequestId("one"))
                driver.say(request, connection)
            case "answer" if self.questions:
                asked = self.questions.pop(0)
                text = pack_body("before", Channel.CONTENT)
                driver.worker(Rendered(number=asked.number, bodies=[text] * 2))
            case "leave" if self.listeners:
                driver.say(Cancel(id=RequestId("join")), self.listeners[-1].connection)
            case "gone" if self.listeners:
                gone = self.listeners.pop()
                driver.leave(gone.connection)
            case "crash":
                driver.exit()
                self.look()
                self.questions.clear()
                driver.pass_time(10.0)
                if driver.state() is State.LOADING:
                    driver.come_up()
                driver.accept(self.key)
            case _:
                return
        self.look()


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_all_readers_get_the_same_tokens_once_and_in_order(steps: list[str]) -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    [key] = driver.serve("one")
    driver.accept(key)
    case = Case(driver, key)
    crashes = 0
    for step in steps:
        crashes += step == "crash"
        if step != "crash" or crashes < 3:
            case.do(step)
        if driver.terminals.get((ALICE, "one")):
            break
    else:
        row = RowDelta(key=key, text="x", tokens=pack_tokens([0]), finish=FinishReason.STOP)
        case.sent += pack_tokens([0])
        driver.worker(Step(step=driver.model().steps + 1, rows=[row]))
        case.look()
        while case.questions:
            case.do("answer")
    for one in case.listeners:
        assert one.end is not None, "a reader waits for ever"
        if isinstance(one.end, Done):
            assert one.end.seq == one.pieces or one.end.finish_reason is FinishReason.CANCELLED
            if one.end.finish_reason is FinishReason.STOP:
                assert one.tokens == case.sent
    driver.core.check_invariants()
