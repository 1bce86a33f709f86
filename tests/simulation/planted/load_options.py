"""Planted bugs: how long models stay while they are idle, and loads as nobody has configured."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("keep_alive: for ever is at once", "keep_alive",
        "return None if keep_alive_s == FOR_EVER else keep_alive_s", "return keep_alive_s"),
    bug("keep_alive: what is configured counts", "keep_alive",
        "if keep_alive_s is None:\n        return configured_s or None",
        "if True:\n        return configured_s or None"),
    bug("keep_alive: whatever makes no sense", "keep_alive",
        "if value is None or value == FOR_EVER or least_s <= value < math.inf:", "if True:"),
    bug("keep_alive: the next request does not end it", "client_events",
        "model.keep_alive_s = message.keep_alive\n        self._fleet.touch(model)",
        "model.keep_alive_s = message.keep_alive or model.keep_alive_s\n"
        "        self._fleet.touch(model)"),
    bug("client_events: a load leaves the idle time as it was", "client_events",
        "model.idle_since = now  # however", "# however"),
    bug("load_options: the context is that of the file", "load_options",
        "return replace(launch, context_length=context_length)", "return launch"),
    bug("load_options: a context of any length", "load_options",
        "if not 0 <= context_length <= MAX_CONTEXT_LENGTH:", "if False:"),
    bug("load_options: a dry run of anything", "load_options",
        "if load.context_length is None and load.keep_alive is None:", "if True:"),
    bug("load_options: another context, however much it needs", "load_options",
        "if isinstance(verdict, Refuse):", "if False:"),
    bug("load_options: another context waits for the next load", "client_events",
        "self._fleet.trigger(model, Reconfigured(settings=settings, drain_s=drain_s), event.now)",
        "model.life.settings = settings"),
)  # fmt: skip
