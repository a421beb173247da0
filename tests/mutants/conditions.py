"""Guards that ask for a state or a time before anything is changed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.suites import CANCELS, ENDINGS, GUARDS, RACES, RULES, TERMS

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
