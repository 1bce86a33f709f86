"""`requests` and `cancel`: what is said of every open request, and who may be ended by whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.client_messages import Done, Reply
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.request_messages import CancelRequest, RequestsQuery
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.worker_messages import CancelRow, PrefillProgress, RowDelta, Step
from mlxsup.supervisor.core.request_status import MOST_LISTED
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE, BOB

ASKING = RequestId("q")


def requests(driver: Driver, client: str | None = None) -> dict[str, Any]:
    """What `requests` is answered."""
    driver.say(RequestsQuery(id=ASKING, client=client), BOB)
    [reply] = driver.sent(Reply, BOB)
    return reply.value


def seen(driver: Driver, client: str | None = None) -> dict[str, dict[str, Any]]:
    """Each request that it lists, by its id."""
    return {one["id"]: one for one in requests(driver, client)["requests"]}


def up(models: int = 1, settings: CoreSettings | None = None) -> Driver:
    """Models with two rows each, READY."""
    names = [f"m{number}" if number else "m" for number in range(models)]
    driver = Driver([entry(name) for name in names], settings)
    for name in names:
        driver.load(name)
        driver.come_up(name)
    return driver


def read(driver: Driver, key: int, done: int, total: int) -> None:
    """A step that has read so much of a prompt."""
    progress = PrefillProgress(key=RequestKey(key), done=done, total=total, computed=done)
    driver.worker(Step(step=1, prefill=[progress], took_s=1.0, reads_on=True))


def test_each_kind_of_request_is_listed_with_what_it_does() -> None:
    driver = up()
    answering, reading = driver.serve("answering", "reading")
    driver.serve("next", priority=Priority.NORMAL)
    driver.serve("last", priority=Priority.BATCH)
    driver.accept(answering)
    driver.accept(reading)
    driver.token(answering)
    driver.now += 2.0
    driver.token(answering)
    read(driver, reading, 1, 3)
    driver.pause("last")
    listed = seen(driver)
    assert list(listed) == ["answering", "reading", "last", "next"], "rows, paused ones, the line"
    doing = {id: (one["state"], one["place"], one["prefill"]) for id, one in listed.items()}
    assert doing == {
        "answering": ("answering", None, None),
        "reading": ("reading", None, 1 / 3),
        "last": ("paused", None, None),
        "next": ("waiting", 1, None),
    }
    assert listed["next"]["reason"] == "rows"
    assert (listed["answering"]["tokens_sent"], listed["answering"]["tokens_per_s"]) == (2, 0.5)
    assert (listed["reading"]["prompt_tokens"], listed["next"]["prompt_tokens"]) == (3, None)
    # A third of the prompt took two seconds.
    assert round(listed["reading"]["expected_s"], 6) == 4.0
    assert {one["model"] for one in listed.values()} == {"m"}


def test_the_speed_of_an_answer_is_known_within_its_first_second() -> None:
    driver = up()
    [key] = driver.serve("one")
    driver.accept(key)
    driver.token(key)
    assert seen(driver)["one"]["tokens_per_s"] is None
    driver.now += 0.5
    driver.token(key)
    assert seen(driver)["one"]["tokens_per_s"] == 2.0


def test_engine_seconds_are_those_until_now() -> None:
    driver = up()
    [key] = driver.serve("one")
    driver.accept(key)
    driver.is_checked = False  # that charges what has been kept
    for _ in range(3):  # alike ones are charged together, later
        driver.now += 2.0
        row = RowDelta(key=key, text="x", tokens=pack_tokens([9]))
        driver.worker(Step(step=1, rows=[row], took_s=2.0, decode_s=2.0))
    assert seen(driver)["one"]["engine_s"] == 6.0


def test_one_that_is_kept_waiting_by_the_limit_of_its_client_says_so() -> None:
    terms = {"team": ClientSettings(max_running=1)}
    driver = up(settings=CoreSettings(clients=terms))
    [key] = driver.serve("known")
    driver.compute(2.0, key)
    driver.token(key, finish=FinishReason.STOP)  # so that it is known what a request costs
    driver.serve("first", "second", client="team")
    assert (seen(driver)["second"]["reason"], seen(driver)["second"]["expected_s"]) == (
        "limit",
        None,
    )


def test_client_picks_an_account_or_a_process_by_its_number() -> None:
    driver = up(settings=CoreSettings(clients={"team": ClientSettings()}))
    driver.serve("a", client="team")
    driver.serve("b", process="process 12@99")
    driver.serve("c", process="terminal 121@99")
    found = {name: list(seen(driver, name)) for name in ("team", "12", "process 12@99", "1", "")}
    assert found == {"team": ["a"], "12": ["b"], "process 12@99": ["b"], "1": [], "": []}


def test_a_long_line_is_cut_and_what_is_left_out_is_counted() -> None:
    limits = CoreSettings(max_queue=9999, max_queue_per_client=9999)
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=1))], limits)
    driver.is_checked = False  # quadratic in the line
    for number in range(MOST_LISTED + 3):
        driver.ask(f"r{number}")
    answer = requests(driver)
    assert (len(answer["requests"]), answer["more"]) == (MOST_LISTED, 3)
    assert [one["place"] for one in answer["requests"]] == list(range(1, MOST_LISTED + 1))


def test_cancelling_ends_the_request_of_another_connection_and_answers_at_once_D13() -> None:
    driver = up()
    running, _ = driver.serve("running", "other")
    driver.serve("waiting")
    driver.accept(running)
    driver.token(running)
    cancelled = {}
    for id in ("waiting", f"#{running}"):
        driver.say(CancelRequest(id=ASKING, request=RequestId(id)), BOB)
        [reply] = driver.sent(Reply, BOB)
        cancelled[id] = reply.value
        ended = driver.sent(Done, ALICE)
        assert [(done.id, done.finish_reason) for done in ended] == [
            (reply.value["request"], FinishReason.CANCELLED)
        ]
    assert cancelled == {
        "waiting": {"request": "waiting", "number": "#3", "model": "m", "tokens_sent": 0},
        "#1": {"request": "running", "number": "#1", "model": "m", "tokens_sent": 1},
    }
    assert [message.key for message in driver.told(CancelRow)] == [running]
    assert list(seen(driver)) == ["other"]


def test_nobody_is_cancelled_by_a_name_that_nobody_or_more_than_one_has() -> None:
    driver = up()
    driver.serve("twin")
    driver.serve("twin", connection=BOB)
    for id in ("nobody", "twin"):
        driver.say(CancelRequest(id=ASKING, request=RequestId(id)), BOB)
        assert driver.errors(BOB) == {"q": "invalid_request"}
    assert len(requests(driver)["requests"]) == 2
