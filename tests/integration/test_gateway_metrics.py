"""`GET /metrics` of a real daemon: everything that is declared is there, and it follows a crash."""

from __future__ import annotations

import os
import signal
import urllib.request

from support.daemon import fake, row
from support.eventually import eventually
from support.exposed import DECLARED, Exposed, declared_samples
from support.http_daemon import HttpDaemon, SseReader, chat


def scrape(daemon: HttpDaemon) -> Exposed:
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=60) as response:
        return Exposed(response.read().decode())


def test_all_metrics_are_there_with_their_labels_and_follow_a_crash() -> None:
    models = {"m": fake(fake={"step_s": 0.02}), "other": fake(preload=False)}
    with HttpDaemon(models) as daemon, daemon.client() as client:
        client.load("m")
        reader = SseReader(daemon, chat("resumed", max_tokens=100)).started()
        running = eventually(lambda: scrape(daemon).value("mlxsup_requests_running", model="m"))
        assert running == 1
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        reader.finished()
        assert daemon.post("/v1/chat/completions", chat("hi") | {"model": "nobody"})[0] == 404
        seen = scrape(daemon)
        assert seen.kinds == {metric.name: metric.kind for metric in DECLARED}
        known = declared_samples()
        for name, labels, _ in seen.samples:
            assert set(labels) == known[name], name
        assert seen.value("mlxsup_model_state", model="m", state="READY") == 1
        assert seen.value("mlxsup_model_state", model="other", state="STOPPED") == 1
        assert seen.value("mlxsup_model_restarts_total", model="m") == 1
        assert seen.value("mlxsup_model_generation", model="m") == 2
        assert seen.value("mlxsup_requests_resumed_total", model="m") == 1
        assert seen.value("mlxsup_requests_total", model="m", finish_reason="length") == 1
        assert seen.value("mlxsup_generation_tokens_total", model="m") == 100
        assert seen.value("mlxsup_time_to_first_token_seconds_count", model="m") == 1
        assert seen.value("mlxsup_request_errors_total", model="", code="unknown_model") == 1
        (exited,) = seen.labels("mlxsup_model_last_exit_timestamp_seconds", "reason")
        assert exited == row(client, "m")["last_exit"]["reason"]


def test_an_eviction_is_counted() -> None:
    sized = fake(memory="300MiB", preload=False)
    budget = {"memory_budget": "400MiB", "min_residency_s": 0}
    with HttpDaemon({"m": sized, "n": sized}, budget) as daemon, daemon.client() as client:
        client.load("m")
        client.load("n")
        assert row(client, "m")["state"] == "STOPPED"
        counted = scrape(daemon).value("mlxsup_evictions_total", model="m", reason="evict")
        assert counted == 1
