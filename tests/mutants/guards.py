"""The guards of the lifecycle, each with the test that notices when it is gone.

Some guards stand behind another one and cannot be missed alone, so they are not here: `outcome IS NULL` in a claim (a
CHECK leaves nothing waiting after an outcome), the slot's state in `MOVE_SLOT` and the outcome's `coalesce` (the job's
compare-and-set comes before), the job's state in `RENEW` and `APPEND` of a post (its row is locked by then).
"""

from __future__ import annotations

from tests.mutants.continued import CONTINUED
from tests.mutants.hang_ups import HANG_UPS
from tests.mutants.mutant import Mutant
from tests.mutants.streams import STREAMS

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

ONLY_PROCESSING = " AND state = 'processing'"

STATE_CONDITIONS = (
    Mutant(
        "a report settles a processing job only",
        RACES + "test_a_late_fault_on_a_stored_job_changes_nothing",
        module="horde.lifecycle.settle",
        within="SETTLE_JOB = ",
        old=ONLY_PROCESSING,
    ),
    Mutant(
        "a result is stored for a processing job only",
        RACES + "test_a_result_that_waits_for_a_fault_finds_its_job_aborted",
        module="horde.lifecycle.store",
        within="STORE_JOB = ",
        old=ONLY_PROCESSING,
    ),
    Mutant(
        "the stale cleanup settles a processing job only",
        RULES + "test_a_job_that_settled_is_not_stale_however_old_its_lease",
        module="horde.lifecycle.settle",
        within="SETTLE_STALE_JOB = ",
        old=ONLY_PROCESSING,
    ),
    Mutant(
        "a claim that did not start is released while processing only",
        GUARDS + "test_a_claim_that_ended_before_it_started_is_not_released_for_not_starting",
        module="horde.lifecycle.release",
        within="RELEASE_UNSTARTED = ",
        old=ONLY_PROCESSING,
    ),
    Mutant(
        "a claim takes waiting slots only",
        RULES + "test_a_claim_takes_the_lowest_waiting_slot_and_remembers_its_worker[text]",
        module="horde.lifecycle.claim",
        within="BEGIN_JOBS = ",
        old=" AND state = 'waiting'",
    ),
    Mutant(
        "a claim needs a waiting slot",
        GUARDS + "test_a_claim_that_gets_nothing_does_not_move_the_expiry",
        module="horde.lifecycle.claim",
        within="TAKE_FROM_REQUEST = ",
        old=" AND waiting > 0",
    ),
    Mutant(
        "an ended request is not kept attached",
        RULES + "test_an_ended_request_has_nobody_attached",
        module="horde.lifecycle.attach",
        within="STAY_ATTACHED = ",
        old=" AND outcome IS NULL",
    ),
    Mutant(
        "retention takes done requests only",
        TERMS + "test_retention_never_takes_a_request_that_is_not_done",
        module="horde.lifecycle.retention",
        old="done_at IS NOT NULL AND done_at <= ",
        new="coalesce(done_at, created_at) <= ",
    ),
)

TIME_CONDITIONS = (
    Mutant(
        "the stale cleanup asks for the lease in the statement that settles",
        RACES + "test_stale_cleanup_that_waits_for_another_change_sees_it[post-held_after3-not_due]",
        module="horde.lifecycle.settle",
        within="SETTLE_STALE_JOB = ",
        old=" AND without_outages(lease_begun, lease_end) < horde_now()",
    ),
    Mutant(
        "a lease does not count an outage",
        TERMS + "test_an_outage_makes_the_leases_that_it_cuts_longer",
        module="horde.lifecycle.settle",
        within="SETTLE_STALE_JOB = ",
        old="without_outages(lease_begun, lease_end)",
        new="lease_end",
    ),
    Mutant(
        "a claim has its time to start",
        ENDINGS + "test_a_claim_that_no_post_has_named_in_time_is_released",
        module="horde.lifecycle.release",
        within="RELEASE_UNSTARTED = ",
        old="\n  AND without_outages(claimed_at, claimed_at + make_interval(secs => %(start_within)s)) < horde_now()",
    ),
    Mutant(
        "the time to start does not count an outage",
        TERMS + "test_a_claim_is_not_taken_for_unstarted_because_of_an_outage",
        module="horde.lifecycle.release",
        within="RELEASE_UNSTARTED = ",
        old="without_outages(claimed_at, claimed_at + make_interval(secs => %(start_within)s))",
        new="claimed_at + make_interval(secs => %(start_within)s)",
    ),
    Mutant(
        "a claim that a post has named has started",
        ENDINGS + "test_a_claim_that_a_post_has_named_is_not_released",
        module="horde.lifecycle.release",
        within="RELEASE_UNSTARTED = ",
        old=" AND started_at IS NULL",
    ),
    Mutant(
        "who posts no progress need not start in time",
        ENDINGS + "test_a_worker_that_posts_no_progress_need_not_start_in_time",
        module="horde.lifecycle.release",
        within="RELEASE_UNSTARTED = ",
        old=" AND posts_progress",
    ),
    Mutant(
        "nothing is claimed after expiry",
        RULES + "test_nothing_is_claimed_of_a_request_whose_time_is_over[expires_at]",
        module="horde.lifecycle.claim",
        within="TAKE_FROM_REQUEST = ",
        old=" AND expires_at > horde_now()",
    ),
    Mutant(
        "nothing is claimed once the attachment has lapsed",
        RULES + "test_nothing_is_claimed_of_a_request_whose_time_is_over[attached_until]",
        module="horde.lifecycle.claim",
        within="TAKE_FROM_REQUEST = ",
        old="\n  AND (attached_until IS NULL OR attached_until > horde_now())",
    ),
    Mutant(
        "maintenance asks again, under the lock, whether a cancel is due",
        CANCELS + "test_an_expiry_that_waits_for_a_result_leaves_the_request_alone",
        module="horde.lifecycle.cancel",
        within="def _cancel(",
        old="if not is_due():",
        new="if False:",
    ),
    Mutant(
        "expiry cancels only what has a waiting slot",
        ENDINGS + "test_expiry_leaves_a_request_alone_that_only_runs",
        module="horde.lifecycle.cancel",
        within="IS_DUE: ",
        old=" AND waiting > 0",
    ),
    Mutant(
        "an attachment does not count an outage",
        TERMS + "test_a_client_is_not_taken_for_gone_because_of_an_outage",
        module="horde.lifecycle.cancel",
        within="IS_DUE: ",
        old="without_outages(attached_until - make_interval(secs => 30), attached_until)",
        new="attached_until",
    ),
    Mutant(
        "a put-back past expiry or deadline is a cancel, after a fault",
        RULES + "test_a_put_back_past_expiry_or_deadline_is_a_cancel[fault-expires_at-expired]",
        module="horde.lifecycle.fault",
        within="def after_fault(",
        old="late = overdue(tx, request.id)",
        new="late = None",
    ),
    Mutant(
        "a put-back past expiry or deadline is a cancel, after a release",
        RULES + "test_a_put_back_past_expiry_or_deadline_is_a_cancel[release-deadline-deadline]",
        module="horde.lifecycle.release",
        within="def _release(",
        old="late = overdue(tx, request.id)",
        new="late = None",
    ),
    Mutant(
        "retention waits for every lease",
        TERMS + "test_retention_waits_for_the_lease_of_every_job",
        module="horde.lifecycle.retention",
        old="without_outages(jobs.lease_begun, jobs.lease_end) > horde_now()",
        new="false",
    ),
    Mutant(
        "one leads until its term is over",
        GUARDS + "test_only_one_leads_until_its_term_is_over",
        module="horde.maintenance.leader",
        old=" OR until < horde_now()",
        new=" OR true",
    ),
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

ANSWERS = (
    Mutant(
        "a cancel's settlement is acknowledged once",
        TERMS + "test_the_workers_own_submit_after_a_cancel_is_answered_once_with_the_reward",
        module="horde.lifecycle.store",
        within="ACKNOWLEDGE = ",
        old=" AND NOT acknowledged",
    ),
    Mutant(
        "only what a cancel stored is acknowledged",
        ENDINGS + "test_any_report_about_a_stored_job_is_a_duplicate[store]",
        module="horde.lifecycle.store",
        within="ACKNOWLEDGE = ",
        old=" AND stored_by_cancel",
    ),
    Mutant(
        "a repeated key gets the first answer",
        ENDINGS + "test_a_report_repeated_with_its_key_is_answered_as_before[fault]",
        module="horde.lifecycle.settle",
        within="def classify(",
        old="if key is not None and row.settle_key == key:",
        new="if False:",
    ),
    Mutant(
        "a rejection is accepted only where the broker does not know better",
        ENDINGS + "test_a_rejection_that_the_broker_knows_to_be_wrong_is_a_fault[context_length_exceeded-True]",
        module="horde.lifecycle.reject",
        old="broker_knows_better or ",
    ),
    Mutant(
        "a rejection has one of two codes",
        ENDINGS + "test_a_rejection_that_the_broker_knows_to_be_wrong_is_a_fault[too_boring-False]",
        module="horde.lifecycle.reject",
        old=" or error_code not in set(Rejection)",
    ),
    Mutant(
        "a post is its owner's",
        GUARDS + "test_a_post_for_a_job_of_another_owner_is_told_to_stop_and_changes_nothing",
        module="horde.lifecycle.progress",
        within="LOCK_JOBS = ",
        old=" AND owner_id = %(owner)s",
    ),
    Mutant(
        "a post renews the lease of a worker that announced posts only",
        GUARDS + "test_a_post_for_a_job_of_a_worker_that_announced_none_leaves_its_lease_alone",
        module="horde.lifecycle.progress",
        within="def post_progress(",
        old=" and row.posts_progress",
    ),
    Mutant(
        "a post comes from a worker of its caller",
        POSTS + "test_a_post_is_from_a_worker_of_the_callers",
        module="horde.registry.check_in",
        within="READ_OWN = ",
        old="owner_id = %(owner)s AND ",
    ),
    Mutant(
        "a post does not bring back a worker that has been away",
        POSTS + "test_a_worker_that_posts_stays_online_however_long_it_does_not_pop",
        module="horde.registry.check_in",
        within="STAY_ONLINE = ",
        old=" AND last_check_in > horde_now() - make_interval(secs => %(online)s)",
    ),
    Mutant(
        "tokens behind a gap are not taken",
        TERMS + "test_what_is_behind_a_gap_of_tokens_or_of_text_is_not_taken",
        module="horde.lifecycle.progress",
        within="def take(",
        old="chunk.offset > self.tokens or ",
    ),
    Mutant(
        "text behind a gap is not taken",
        TERMS + "test_what_is_behind_a_gap_of_tokens_or_of_text_is_not_taken",
        module="horde.lifecycle.progress",
        within="def take(",
        old=" or chunk.text_offset > self.characters",
    ),
    Mutant(
        "no more tokens are kept than were ordered",
        TERMS + "test_no_more_is_kept_than_the_order_asked_for",
        module="horde.lifecycle.progress",
        within="def take(",
        old="self.max_length - chunk.offset",
    ),
    Mutant(
        "no more text is kept than those tokens can have",
        TERMS + "test_no_more_is_kept_than_the_order_asked_for",
        module="horde.lifecycle.progress",
        within="def take(",
        old="most - chunk.text_offset",
    ),
    Mutant(
        "only an attached client has the beginning of a text",
        TERMS + "test_without_an_attached_client_nobody_has_a_beginning_and_a_retry_begins_anew[text]",
        module="horde.lifecycle.settle",
        within="KEEP_PREFIX = ",
        old=" AND r.attached_until IS NOT NULL",
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


def _trigger(name: str, table: str, case: str) -> Mutant:
    return Mutant(
        f"trigger {name}",
        f"{REFUSALS}test_a_trigger_refuses_what_no_transition_does[{case}]",
        sql=f"DROP TRIGGER {name} ON {table}",
    )


def _index(name: str, test: str) -> Mutant:
    return Mutant(f"unique index {name}", test, sql=f"DROP INDEX {name}")


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
