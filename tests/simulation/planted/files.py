"""Planted bugs: models whose files have changed."""

from __future__ import annotations

from .mutant import bug

MUTANTS = (
    bug("files: changed ones keep no model", "swapping",
        "    if why_it_stays(model):\n        return None\n", ""),
    bug("files: the answer is not noted", "lifecycle.on_files",
        "change\n    life.files = Files(seen_at=now, change=trigger.change)\n", "change\n"),
    bug("files: what was found is doubted at once", "lifecycle.files",
        "return self.seen_at is not None and now < self.seen_at + COUNTS_FOR_S", "return False"),
    bug("files: nobody looks at them", "changed_files",
        "return _has_begun(model) and not model.life.files.is_fresh(now)", "return False"),
)  # fmt: skip
