"""What the database itself refuses, whoever asks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.suites import GUARDS, REFUSALS


def _trigger(name: str, table: str, case: str) -> Mutant:
    return Mutant(
        f"trigger {name}",
        f"{REFUSALS}test_a_trigger_refuses_what_no_transition_does[{case}]",
        sql=f"DROP TRIGGER {name} ON {table}",
    )


def _index(name: str, test: str) -> Mutant:
    return Mutant(f"unique index {name}", test, sql=f"DROP INDEX {name}")


def _check(name: str, table: str) -> Mutant:
    return Mutant(
        f"check {name}",
        f"{REFUSALS}test_a_constraint_refuses_what_does_not_add_up[{name}]",
        sql=f"ALTER TABLE {table} DROP CONSTRAINT {name}",
    )


DATABASE = (
    _trigger("outcome_is_set_once", "requests", "another outcome"),
    _trigger("done_is_final", "requests", "another result after done"),
    _trigger("job_settles_once", "jobs", "another text"),
    _trigger("job_begins_processing", "jobs", "a job that begins settled"),
    _trigger("slot_ends_once", "slots", "a dropped slot runs"),
    _trigger("slot_is_stored_from_processing", "slots", "a slot stored unrun"),
    _trigger("nothing_waits_after_an_outcome", "slots", "a slot waits after the outcome"),
    _trigger("nothing_new_waits_after_an_outcome", "slots", "a new slot after the outcome"),
    _trigger("events_stay", "events", "a changed event"),
    _trigger("ledger_stays", "ledger", "a deleted ledger line"),
    _index("uq_jobs_one_processing", REFUSALS + "test_a_slot_has_no_second_processing_job"),
    _index("uq_jobs_one_stored", REFUSALS + "test_a_slot_has_no_second_stored_job"),
    _index("uq_workers_name", GUARDS + "test_two_workers_of_one_name_cannot_both_live"),
    _index("uq_accounts_system", GUARDS + "test_there_is_one_mint"),
    _check("ck_requests_nothing_waits_after_an_outcome", "requests"),
    _check("ck_requests_counts_add_up", "requests"),
    _check("ck_requests_done", "requests"),
)
