"""mlx_lm.server as a child process that is struck: killed, stopped, flooded, fed with noise."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from support.eventually import eventually
from support.verdict import NotShown

START_S = 120.0
TOO_LARGE = 1_000_000
"""As `top_k` more than any vocabulary: an engine that lets it through raises in its step."""


class PeerStream(threading.Thread):
    """One streamed answer of the peer, and when its pieces came."""

    def __init__(self, port: int, prompt: str, max_tokens: int, timeout_s: float) -> None:
        super().__init__(daemon=True)
        self._port, self._timeout_s = port, timeout_s
        self._body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self.times: list[float] = []
        self.is_whole = False
        self.has_started = threading.Event()
        self.start()

    def run(self) -> None:
        """Reads."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body))
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())
                    self.has_started.set()
                self.is_whole |= line.startswith(b"data: [DONE]")
        except (OSError, http.client.HTTPException):
            pass  # `is_whole` says that it did not end well
        finally:
            connection.close()
            self.has_started.set()

    @property
    def largest_gap_ms(self) -> float:
        """The longest wait between two pieces."""
        return 1000 * max(after - before for before, after in pairwise(self.times))


class Peer:
    """A server with one model, on its own port."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = int(taken.getsockname()[1])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlx_lm", "server", "--model", str(model)),
                *("--host", "127.0.0.1", "--port", str(self.port), "--log-level", "ERROR"),
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    def __enter__(self) -> Self:
        try:
            eventually(lambda: self.answers(10.0), timeout_s=START_S)
        except AssertionError as error:
            self.end()
            raise NotShown(f"mlx_lm.server did not start: {error}") from error
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Ends it, stopped or not."""
        self.process.kill()
        self.process.wait()
        self._log.close()

    def strike(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def answers(self, timeout_s: float, **parameters: object) -> bool:
        """Whether it answers a short request, within this time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        body = {"prompt": "a b c", "max_tokens": 4, **parameters}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            return answer.status == http.HTTPStatus.OK and b'"choices"' in answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def raise_in_step(self) -> None:
        """A request that the server lets through and the engine raises for."""
        self.answers(10.0, temperature=1.0, top_k=TOO_LARGE)

    def answers_again_s(self, patience_s: float) -> float:
        """How long until it answers again; infinite where it does not in time."""
        start_s = time.monotonic()
        while (passed_s := time.monotonic() - start_s) < patience_s:
            if self.answers(patience_s - passed_s):
                return time.monotonic() - start_s
            # Whether it comes back is seen by asking only.
            time.sleep(min(0.1, patience_s))
        return float("inf")

    def stream(self, prompt: str, max_tokens: int, timeout_s: float = 60.0) -> PeerStream:
        """A streamed answer."""
        return PeerStream(self.port, prompt, max_tokens, timeout_s)
