"""The bare forwarder and the readers next to which the gateway is measured: real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlxsup.cli.benchmark.http_reading import Address

from bench.http.cost import event_of, forwarding, paced, readers, serving, unpaced_us
from support.verdict import NotShown

SIZE_BYTES = 205


@pytest.fixture(params=["asyncio", "uvloop"])
def forwarder(request: pytest.FixtureRequest) -> Iterator[tuple[Address, int]]:
    with forwarding(SIZE_BYTES, request.param) as about:
        yield about


def test_the_forwarder_passes_every_event_on_as_one_chunk(
    forwarder: tuple[Address, int],
) -> None:
    address, _ = forwarder
    with readers(address, 2, 1) as child:
        before = child.ask()
        after = child.ask()
        while after["events"] < before["events"] + 20:
            after = child.ask()
    events = after["events"] - before["events"]
    framed = len(b"%x\r\n%b\r\n" % (SIZE_BYTES, event_of(SIZE_BYTES).encode()))
    # Two clients, and the first line of each answer came before; on a busy machine the forwarder
    # reads several events at once, and frames them once.
    assert events * SIZE_BYTES <= after["bytes"] - before["bytes"] <= (events + 2) * framed


def test_streams_that_nobody_answers_are_no_figure() -> None:
    with forwarding(SIZE_BYTES, "asyncio") as (address, _):
        pass
    with pytest.raises(NotShown, match="brought nothing"), readers(address, 1, 1):
        pass


@pytest.mark.skipif("sys.platform != 'linux'", reason="the kernel tells the time of other threads")
def test_the_gateway_is_measured_with_a_chunk_for_each_token() -> None:
    with serving(0.0) as (address, pid):
        loop_us, others_us = unpaced_us(address, pid, 50)
        assert loop_us > 0
        assert others_us >= 0
    with serving(0.002) as (address, pid):
        cost_us, size_bytes = paced(address, pid, 0.5)
        assert cost_us > 0
        assert size_bytes > len("data: ")
