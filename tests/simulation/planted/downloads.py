"""Planted bugs: models whose files have to be downloaded."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("downloads: none is started", "downloads",
        "self._outbox.add(StartDownload(number=self._started, repository=repository))", "pass"),
    bug("downloads: one of which nobody waits runs on", "downloads",
        "self._outbox.add(EndDownload(number=self._running.pop(repository).number))",
        "self._running.pop(repository)"),
    bug("downloads: one model of a repository has its files", "downloads",
        "for model in list(_waiting_for(repository, models)):",
        "for model in list(_waiting_for(repository, models))[:1]:"),
    bug("downloads: how far one has come is not news", "downloads",
        "self._running[repository].fetching = fetching\n                trigger = LacksFiles",
        "return\n                trigger = LacksFiles"),
    bug("on_download: everything is tried again", "lifecycle.on_download",
        "if trigger.is_passing else None", "if True else None"),
    bug("on_download: nothing is tried again", "lifecycle.on_download",
        "if trigger.is_passing else None", "if False else None"),
    bug("on_download: a hub that asks for patience gets none", "lifecycle.on_download",
        "retry_at = now + max(delay_s, trigger.retry_after_s)", "retry_at = now + delay_s"),
    bug("on_download: who waits for the load waits on", "lifecycle.on_download",
        "life.do(UpWaitersEnd(error=load_failed(life.name, said, is_retryable=True)))", "pass"),
    bug("on_download: requests wait for what never comes", "lifecycle.on_download",
        "life.do(QueueEnds(error=error), UpWaitersEnd(error=error))",
        "life.do(UpWaitersEnd(error=error))"),
    bug("on_download: another folder is loaded", "lifecycle.on_download",
        "launch = replace(life.settings.launch, path=trigger.folder)",
        "launch = life.settings.launch"),
    bug("pending: a load does not wait for the files", "pending",
        "isinstance(model.life.phase, Pending) and model.life.settings.download is None",
        "isinstance(model.life.phase, Pending)"),
)  # fmt: skip
