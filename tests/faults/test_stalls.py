"""Honest work that takes long kills no worker (P7). Real: daemons with fake engines.

Steps that stall: test_worker_deaths.py; prompts of MLX without end: test_real_engine.py.
"""

from __future__ import annotations

from support.daemon.daemon import Daemon, fake, row
from support.daemon.faults import undisturbed


def test_a_prompt_of_40000_tokens_on_a_slow_model_is_honest_work_F5_P7() -> None:
    """Its prefill takes many times the limit of a step, in steps that each end."""
    options = {"step_s": 0.05, "prefill_tokens_per_step": 256, "context_length": 50_000}
    with (
        Daemon({"m": fake(fake=options, step_timeout_s=1.5)}) as daemon,
        daemon.client() as client,
    ):
        prompt = "x" * 40_000
        result = client.complete("m", prompt=prompt, max_tokens=3)
        assert result.token_ids == undisturbed(prompt, 3)
        assert (result.usage.prompt_tokens, result.resumed) == (40_000, 0)
        assert row(client, "m")["steps"] > 40_000 // 256
        assert row(client, "m")["generation"] == 1
