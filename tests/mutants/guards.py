"""The guards of the lifecycle, each with the test that notices when it is gone.

Some guards stand behind another one and cannot be missed alone, so they are not here: `outcome IS NULL` in a claim (a
CHECK leaves nothing waiting after an outcome), the slot's state in `MOVE_SLOT` and the outcome's `coalesce` (the job's
compare-and-set comes before), the job's state in `RENEW` and `APPEND` of a post (its row is locked by then).
"""

from __future__ import annotations

from tests.mutants.answers import ANSWERS
from tests.mutants.conditions import STATE_CONDITIONS, TIME_CONDITIONS
from tests.mutants.continued import CONTINUED
from tests.mutants.database import DATABASE
from tests.mutants.hang_ups import HANG_UPS
from tests.mutants.mutant import Mutant
from tests.mutants.streams import STREAMS
from tests.mutants.suites import (
    CANCELS,
    CHAT_POPS,
    ENDINGS,
    FOLDS,
    GUARDS,
    MAINTENANCE,
    POLLS,
    RACES,
    ROOM,
    RULES,
    TERMS,
)

LOCKS = (
    Mutant(
        "a cancel locks the request",
        CANCELS + "test_a_cancel_that_waits_for_the_last_result_comes_too_late",
        module="horde.lifecycle.rows",
        within="LOCK_REQUEST = ",
        old=" FOR UPDATE",
    ),
    Mutant(
        "a report locks the request of its job",
        GUARDS + "test_a_job_is_read_under_the_lock_of_its_request",
        module="horde.lifecycle.rows",
        within="LOCK_JOB_REQUEST = ",
        old=" FOR UPDATE OF r",
    ),
    Mutant(
        "a second fault waits for the first",
        RACES + "test_the_second_fault_waits_for_the_first_and_ends_the_request",
        module="horde.lifecycle.rows",
        within="LOCK_JOB_REQUEST = ",
        old=" FOR UPDATE OF r",
    ),
    Mutant(
        "a cancel locks the jobs that it may store",
        GUARDS + "test_a_cancel_waits_for_a_post_under_way_and_stores_what_it_brought",
        module="horde.lifecycle.rows",
        within="LOCK_PROCESSING_JOBS = ",
        old=" FOR UPDATE",
    ),
    Mutant(
        "jobs are locked by id",
        GUARDS + "test_a_post_and_a_cancel_take_their_jobs_in_the_same_order",
        module="horde.lifecycle.rows",
        within="LOCK_PROCESSING_JOBS = ",
        old="ORDER BY id",
        new="ORDER BY id DESC",
    ),
    Mutant(
        "a post locks its jobs",
        GUARDS + "test_a_post_that_has_begun_is_not_overtaken_by_the_end_of_its_job",
        module="horde.lifecycle.progress",
        within="LOCK_JOBS = ",
        old=" FOR UPDATE",
    ),
    Mutant(
        "a beat locks the heartbeat",
        GUARDS + "test_two_brokers_that_find_the_same_outage_write_it_once",
        module="horde.lifecycle.outages",
        within="LOCK_HEARTBEAT = ",
        old=" FOR UPDATE",
    ),
    Mutant(
        "retention steps over a locked request",
        CANCELS + "test_retention_steps_over_a_request_that_is_being_looked_at",
        module="horde.lifecycle.retention",
        old=" SKIP LOCKED",
    ),
    Mutant(
        "a pop steps over a locked request",
        GUARDS + "test_a_pop_passes_over_a_locked_request_when_another_waits",
        module="horde.queue.candidates",
        within="CHOOSE_UNLOCKED = ",
        old=" SKIP LOCKED",
    ),
    Mutant(
        "a poll passes a wake-up on that it has no use for",
        POLLS + "test_a_wake_up_goes_on_to_the_poll_that_can_do_it",
        module="horde.usecases.pop",
        old="context.wakeups.pass_on(woken, told)",
        new="pass",
    ),
    Mutant(
        "a job that a retry was given is not handed back",
        POLLS + "test_a_retry_that_was_given_the_job_keeps_it_when_the_first_call_finds_its_client_gone",
        module="horde.lifecycle.release",
        within="RELEASE_UNDELIVERED = ",
        old=" AND NOT refetched",
    ),
    Mutant(
        "a claim asks whether its worker was deleted",
        POLLS + "test_a_worker_that_is_stopped_while_it_polls_gets_nothing_of_strangers[deleted]",
        module="horde.queue.filter",
        within="OFFER = ",
        old=" AND deleted_at IS NULL",
    ),
    Mutant(
        "a pop that found only locked requests tries again",
        GUARDS + "test_a_pop_that_finds_its_only_request_locked_waits_for_it_and_gets_its_slot",
        module="horde.queue.candidates",
        within="def claim_first(",
        old="if taken or not look(database, popper):",
        new="if True:",
    ),
)

OUTCOMES = (
    Mutant(
        "a cancel after an outcome changes nothing",
        ENDINGS + "test_a_second_cancel_or_one_after_another_outcome_changes_nothing",
        module="horde.lifecycle.cancel",
        within="def _cancel(",
        old="if request.outcome is not None:",
        new="if False:",
    ),
    Mutant(
        "a fault after an outcome puts nothing back",
        ENDINGS + "test_after_a_cancel_a_report_settles_its_own_job_only[fault]",
        module="horde.lifecycle.fault",
        within="def after_fault(",
        old="if request.outcome is not None:",
        new="if False:",
    ),
    Mutant(
        "a release after an outcome puts nothing back",
        ENDINGS + "test_after_a_cancel_a_report_settles_its_own_job_only[release]",
        module="horde.lifecycle.release",
        within="def _release(",
        old="if request.outcome is not None:",
        new="if False:",
    ),
    Mutant(
        "a release after an outcome does not count towards the cap",
        ENDINGS + "test_releases_after_a_cancel_are_not_counted_towards_the_cap",
        module="horde.lifecycle.release",
        within="def _release(",
        old="request.outcome is None and releases",
        new="releases",
    ),
    Mutant(
        "a rejection after an outcome sets none",
        ENDINGS + "test_after_a_cancel_a_report_settles_its_own_job_only[reject]",
        module="horde.lifecycle.reject",
        old="if request.outcome is not None:",
        new="if False:",
    ),
    Mutant(
        "a result after a cancel completes nothing",
        CANCELS + "test_a_submit_that_waits_for_a_cancel_is_stored_and_paid",
        module="horde.lifecycle.store",
        within="def store(",
        old="request.outcome is None and ",
    ),
    Mutant(
        "a request completes when nothing waits",
        GUARDS + "test_a_result_does_not_complete_a_request_while_a_slot_waits",
        module="horde.lifecycle.store",
        within="def store(",
        old="request.waiting == 0 and ",
    ),
    Mutant(
        "a request completes when nothing else runs",
        GUARDS + "test_a_job_is_read_under_the_lock_of_its_request",
        module="horde.lifecycle.store",
        within="def store(",
        old=" and request.processing == 1",
    ),
    Mutant(
        "the second fault ends the request",
        RULES + "test_the_second_faulted_job_ends_the_request_and_voids_the_others[text]",
        module="horde.lifecycle.fault",
        within="def after_fault(",
        old="faults >= FAULTED_GENERATIONS_LIMIT or ",
    ),
    Mutant(
        "the limit of faults is two",
        RULES + "test_two_faults_of_different_slots_reach_the_limit_too",
        module="horde.lifecycle.words",
        old="FAULTED_GENERATIONS_LIMIT = 2",
        new="FAULTED_GENERATIONS_LIMIT = 3",
    ),
    Mutant(
        "an image slot restarts while attempts remain",
        RULES + "test_an_image_request_for_one_faults_at_its_first_fault",
        module="horde.lifecycle.kinds",
        old="return stored + faulted < n",
        new="return True",
    ),
    Mutant(
        "releases of a slot are capped",
        ENDINGS + "test_the_sixth_release_of_a_slot_counts_as_a_fault_but_blames_nobody",
        module="horde.lifecycle.release",
        within="def _release(",
        old="releases >= RELEASES_PER_SLOT",
        new="False",
    ),
    Mutant(
        "what ends a request leaves nothing in the queue",
        ENDINGS + "test_a_cancel_drops_what_waits_and_lets_finish_what_runs[text]",
        module="horde.lifecycle.settle",
        within="def drop_waiting(",
        old='tx.execute(LEAVE_QUEUE, {"request": request_id})',
        new="pass",
    ),
    Mutant(
        "expiry does not store what runs for a client who waits",
        TERMS + "test_expiry_of_an_attached_request_lets_its_jobs_run_on",
        module="horde.lifecycle.cancel",
        within="def cancel_locked(",
        old=" and reason is not CancelReason.EXPIRED",
    ),
)

SLOTS = (
    Mutant(
        "a pop that holds a request waits for no other",
        GUARDS + "test_a_pop_that_holds_a_request_does_not_wait_for_the_next_one",
        module="horde.queue.candidates",
        within="def _choose_and_take(",
        old=" and not taken",
    ),
    Mutant(
        "a pop takes no more than its worker has room for",
        ROOM + "test_a_request_that_does_not_fit_is_taken_in_part_and_its_rest_comes_first_next_time",
        module="horde.queue.candidates",
        within="def _choose_and_take(",
        old="most - len(taken)",
        new="most",
    ),
    Mutant(
        "a pop without slots takes of one request",
        ROOM + "test_without_slots_a_pop_takes_of_one_request_only",
        module="horde.queue.candidates",
        within="def _choose_and_take(",
        old=" or not several",
    ),
    Mutant(
        "pops at once under one key share a claim of several requests",
        ROOM + "test_pops_at_once_under_one_key_are_all_answered_with_the_same_jobs",
        module="horde.usecases.pop",
        old="stop_if_claimed(tx, claimant)",
        new="pass",
    ),
    Mutant(
        "a pop does not take its own jobs for another one's",
        ROOM + "test_a_repeat_under_the_key_gets_all_of_the_jobs_again_in_their_order",
        module="horde.usecases.pop",
        old="if count == most:",
        new="if True:",
    ),
    Mutant(
        "strangers who share the anonymous key share no salt",
        ROOM + "test_strangers_who_share_the_anonymous_key_share_no_salt",
        module="horde.lifecycle.claim",
        within="TENANT = ",
        old=" AND u.id <> 0",
    ),
)


MAINTAINED = (
    Mutant(
        "a pass beats first",
        MAINTENANCE + "test_nobody_is_blamed_for_an_outage",
        module="horde.maintenance.passes",
        within="def run_pass(",
        old="context.database.run(beat)",
        new="pass",
    ),
    Mutant(
        "a leader that lost its lease stops",
        MAINTENANCE + "test_a_leader_paused_past_its_lease_stops_where_it_was",
        module="horde.maintenance.passes",
        within="def _settle(",
        old="if not may_go_on():",
        new="if False:",
    ),
    Mutant(
        "a leader believes in its lease for a while only",
        MAINTENANCE + "test_a_leader_paused_past_its_lease_stops_where_it_was",
        module="horde.maintenance.leader",
        old="return time.monotonic() < self._until",
        new="return self._until > 0",
    ),
    Mutant(
        "two folds take different events",
        FOLDS + "test_two_folds_at_once_take_different_events",
        module="horde.statistics.fold",
        within="CLAIM_UNFOLDED = ",
        old=" SKIP LOCKED",
    ),
)


WHO_TAKES_CHATS = (
    Mutant(
        "a pinned request goes to a worker of its revision",
        CHAT_POPS + "test_a_chat_waits_for_the_revision_that_it_was_counted_with",
        module="horde.queue.filter",
        old="(r.revision IS NULL OR r.revision = ANY (w.revisions))",
        new="true",
    ),
    Mutant(
        "what needs progress goes to a worker that posts it",
        CHAT_POPS + "test_what_needs_progress_goes_to_a_worker_that_posts_it",
        module="horde.queue.filter",
        old="(NOT r.needs_progress OR w.posts_progress)",
        new="true",
    ),
    Mutant(
        "one that takes no chats does not stand in the way of a chat's retry",
        CHAT_POPS + "test_a_released_chat_goes_back_to_its_worker_when_nobody_else_could_serve_it[no_chats]",
        module="horde.queue.filter",
        old='"r.kind = ANY (w.kinds)"',
        new='"true"',
    ),
    Mutant(
        "a pinned request runs on the model that it is pinned to",
        CHAT_POPS + "test_a_request_for_several_models_runs_on_the_one_that_it_is_pinned_to",
        module="horde.usecases.hand_out",
        within="def _may_run(",
        old="candidate.revision is None or ",
        new="True or ",
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *STATE_CONDITIONS,
    *TIME_CONDITIONS,
    *LOCKS,
    *OUTCOMES,
    *ANSWERS,
    *SLOTS,
    *CONTINUED,
    *HANG_UPS,
    *MAINTAINED,
    *WHO_TAKES_CHATS,
    *STREAMS,
    *DATABASE,
)
