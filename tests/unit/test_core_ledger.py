"""The ledger of open requests: what it counts, what it finds, what a request knows of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.worker_messages import Acceptance
from mlxsup.supervisor.core.health.blame import Digest, Held
from mlxsup.supervisor.core.requests.ledger import Ledger, Request, Stage
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings
from mlxsup.supervisor.core.sharing.accounts import Account, Terms

from support.core_looks import ALICE, BOB

ACCEPTANCE = Acceptance(
    prompt_tokens=pack_tokens([1, 2, 3]), opening="", parameters={"a": 1}, seed=5, fingerprint="f"
)


def request(key: int, **changes: Any) -> Request:
    plain = Request(
        key=RequestKey(key), connection=ALICE, id=RequestId(f"r{key}"), account=Account("c"),
        model=ModelName("m"), body=b"12345", digest=Digest(b"d"), arrived_at=10.0,
    )  # fmt: skip
    return replace(plain, **changes)


X = Account("x")


def ledger_of(**clients: ClientSettings) -> Ledger:
    return Ledger(Terms(CoreSettings(clients=clients)))


def counts(ledger: Ledger) -> tuple[int, dict[Account, int], int, int]:
    ledger.check_invariants()
    return (ledger.waiting, ledger.waiting_by_account, len(ledger), ledger.held_bytes)


def test_requests_are_counted_from_their_admission_to_their_end() -> None:
    ledger = ledger_of()
    assert counts(ledger) == (0, {}, 0, 0)
    assert [ledger.new_key(), ledger.new_key()] == [1, 2]
    one, two = request(1), request(2, connection=BOB, account=X, wants_notices=True)
    three = request(3, account=X)
    for each in (one, two, three):
        ledger.add(each)
    assert counts(ledger) == (3, {"c": 1, "x": 2}, 3, 15)
    assert list(ledger) == [one, two, three]
    assert (ledger.waiting_of(X), ledger.waiting_of(Account("nobody"))) == (2, 0)
    assert ledger.has_listeners
    ledger.move(two, Stage.RUNNING)
    assert counts(ledger) == (2, {"c": 1, "x": 1}, 3, 15)
    assert ledger.running_by_account == {X: 1}
    ledger.move(two, Stage.QUEUED)
    assert counts(ledger) == (3, {"c": 1, "x": 2}, 3, 15)
    ledger.remove(two)
    assert not ledger.has_listeners
    assert counts(ledger) == (2, {"c": 1, "x": 1}, 2, 10)
    ledger.remove(one)
    ledger.remove(three)
    assert counts(ledger) == (0, {}, 0, 0)
    assert ledger.of_connection(ALICE) == []


def test_requests_are_found_by_key_and_by_who_asked() -> None:
    ledger = ledger_of()
    one, two, other = request(1), request(2), request(3, id=RequestId("r1"), connection=BOB)
    for each in (one, two, other):
        ledger.add(each)
    assert (ledger.get(RequestKey(2)), ledger.get(RequestKey(9))) == (two, None)
    assert ledger.find(ALICE, RequestId("r1")) is one
    assert ledger.find(BOB, RequestId("r1")) is other
    assert ledger.find(BOB, RequestId("r2")) is None
    assert ledger.of_connection(ALICE) == [one, two]
    ledger.remove(one)
    assert ledger.find(ALICE, RequestId("r1")) is None
    assert ledger.of_connection(ALICE) == [two]


def test_an_answer_that_has_begun_takes_no_place_and_its_resume_data_counts() -> None:
    ledger = ledger_of()
    one = request(1)
    ledger.add(one)
    ledger.move(one, Stage.RUNNING)
    one.started_at = 10.0
    ledger.accept(one, ACCEPTANCE)
    taken = 3 * 4 + len("{'a': 1}")
    assert (one.body, one.acceptance_bytes) == (b"", taken)
    assert counts(ledger) == (0, {}, 1, taken)
    ledger.deliver(one, pack_tokens([9, 9]))
    assert counts(ledger) == (0, {}, 1, taken + 8)
    assert (one.tokens_sent, one.held) == (2, Held(digest=Digest(b"d"), tokens=2))
    for stage in (Stage.YIELDING, Stage.QUEUED):
        ledger.move(one, stage)
        assert counts(ledger)[0] == 0, stage
    ledger.remove(one)
    assert counts(ledger) == (0, {}, 0, 0)


def test_a_request_knows_its_tokens_and_where_its_time_has_gone() -> None:
    one = request(1)
    assert one.usage() == Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    assert one.timings(15.0) == Timings(
        queued_s=5.0, tokenize_s=0.0, prefill_s=0.0, first_token_s=0.0, total_s=5.0
    )
    one.acceptance, one.cached_tokens, one.sent_tokens = ACCEPTANCE, 2, bytearray(8)
    one.started_at, one.first_token_at, one.tokenize_s, one.prefill_s = 11.0, 13.0, 0.25, 0.5
    one.engine_s = 1.5
    assert one.usage() == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2, engine_s=1.5)
    assert one.timings(20.0) == Timings(
        queued_s=1.0, tokenize_s=0.25, prefill_s=0.5, first_token_s=3.0, total_s=10.0
    )


def test_how_many_of_an_account_run_decides_whether_one_more_may() -> None:
    ledger = ledger_of(x=ClientSettings(max_running=2))
    requests = [request(key, account=X) for key in range(1, 4)]
    for each in requests:
        ledger.add(each)
    for number, each in enumerate(requests[:2]):
        assert ledger.may_run(X), number
        ledger.move(each, Stage.RUNNING)
    assert not ledger.may_run(X)
    assert ledger.may_run(Account("c")), "nothing limits it"
    assert not ledger.take_freed()
    ledger.move(requests[0], Stage.YIELDING)
    assert not ledger.may_run(X), "its row has yet to leave"
    ledger.move(requests[0], Stage.QUEUED)
    assert (ledger.may_run(X), ledger.take_freed(), ledger.take_freed()) == (True, True, False)
    ledger.remove(requests[0])
    assert not ledger.take_freed(), "it did not run"
    ledger.remove(requests[1])
    assert ledger.take_freed()
    assert ledger.running_by_account == {}
    ledger.check_invariants()


def test_who_runs_without_a_limit_holds_nobody_up() -> None:
    ledger = ledger_of()
    one = request(1)
    ledger.add(one)
    ledger.move(one, Stage.RUNNING)
    ledger.remove(one)
    assert not ledger.take_freed()
