"""Where the tests are that guards are held by."""

from __future__ import annotations

RULES = "tests/integration/test_lifecycle_rules.py::"
ENDINGS = "tests/integration/test_lifecycle_endings.py::"
TERMS = "tests/integration/test_lifecycle_terms.py::"
REFUSALS = "tests/integration/test_lifecycle_refusals.py::"
RACES = "tests/integration/test_generation_lifecycle_races.py::"
CANCELS = "tests/integration/test_cancel_races.py::"
POLLS = "tests/integration/test_long_poll.py::"
MAINTENANCE = "tests/integration/test_maintenance_threads.py::"
FOLDS = "tests/integration/test_folds.py::"
GUARDS = "tests/integration/test_guards.py::"
ROOM = "tests/integration/test_pop_slots.py::"
POSTS = "tests/integration/test_progress.py::"
CHAT_POPS = "tests/integration/test_chat_pop.py::"
