"""Guards of what a caller is told, once and again."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.suites import ENDINGS, GUARDS, POSTS, TERMS

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
