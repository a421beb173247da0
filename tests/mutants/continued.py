"""The guards of what clients wait for: who comes and goes, who goes on with a stream, and with what."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ATTACHED = "tests/integration/test_attachments.py::"
_CONTINUED = "tests/integration/test_continued_slots.py::"
_CHATS = "tests/integration/test_chat_submits.py::"
_COSTS = "tests/integration/test_statement_counts.py::"

CONTINUED = (
    Mutant(
        "an ended request is not joined",
        _ATTACHED + "test_what_has_ended_or_was_never_attached_is_not_joined",
        module="horde.lifecycle.attach",
        within="JOIN = ",
        old=" AND outcome IS NULL",
    ),
    Mutant(
        "nobody joins a request that is polled",
        _ATTACHED + "test_what_has_ended_or_was_never_attached_is_not_joined",
        module="horde.lifecycle.attach",
        within="JOIN = ",
        old=" AND attached_until IS NOT NULL",
    ),
    Mutant(
        "who leaves after the end changes nothing",
        _ATTACHED + "test_leaving_twice_or_after_the_end_changes_nothing",
        module="horde.lifecycle.attach",
        within="def leave(",
        old=" or request.outcome is not None",
    ),
    Mutant(
        "nobody leaves who does not wait",
        _ATTACHED + "test_leaving_twice_or_after_the_end_changes_nothing",
        module="horde.lifecycle.attach",
        within="LEAVE = ",
        old=" AND attached_by > 0",
    ),
    Mutant(
        "only the last to leave cancels",
        _ATTACHED + "test_the_last_to_leave_cancels_and_whoever_is_left_goes_on",
        module="horde.lifecycle.attach",
        within="def leave(",
        old="!= 0",
        new="is None",
    ),
    Mutant(
        "a pinned request is taken in its revision only",
        _CONTINUED + "test_only_who_serves_the_revision_a_request_is_pinned_to_takes_it",
        module="horde.lifecycle.claim",
        within="TAKE_FROM_REQUEST = ",
        old=" AND (revision IS NULL OR revision = %(revision)s)",
    ),
    Mutant(
        "a stream is taken by a worker that posts only",
        _CONTINUED + "test_only_who_serves_the_revision_a_request_is_pinned_to_takes_it",
        module="horde.lifecycle.claim",
        within="TAKE_FROM_REQUEST = ",
        old=" AND (NOT needs_progress OR %(posts_progress)s)",
    ),
    Mutant(
        "a stream that was begun goes on with a worker that posts",
        _CONTINUED + "test_a_stream_that_was_begun_is_pinned_to_who_can_go_on_with_it",
        module="horde.lifecycle.settle",
        within="KEEP_PREFIX = ",
        old="needs_progress = true, ",
    ),
    Mutant(
        "a stream that was begun goes on in the revision that began it",
        _CONTINUED + "test_a_stream_that_was_begun_is_pinned_to_who_can_go_on_with_it",
        module="horde.lifecycle.settle",
        within="KEEP_PREFIX = ",
        old="coalesce(r.revision, jobs.revision)",
        new="r.revision",
    ),
    Mutant(
        "a text goes on from what was posted",
        _CONTINUED + "test_a_result_that_does_not_go_on_from_what_was_posted_changes_nothing[another text]",
        module="horde.lifecycle.posted",
        within="def is_continued_by(",
        old=" and text.startswith(self.text)",
    ),
    Mutant(
        "tokens go on from what was posted",
        _CONTINUED + "test_a_result_that_does_not_go_on_from_what_was_posted_changes_nothing[other tokens]",
        module="horde.lifecycle.posted",
        within="def is_continued_by(",
        old="begins and ",
    ),
    Mutant(
        "only who waits was sent something",
        _CONTINUED + "test_nobody_who_polls_was_sent_anything",
        module="horde.lifecycle.store",
        within="def store(",
        old="request.attached and ",
    ),
    Mutant(
        "nobody posts while a result is compared with what was posted",
        _CONTINUED + "test_a_result_that_waits_for_a_post_has_to_go_on_from_it",
        module="horde.lifecycle.rows",
        within="LOCK_JOB = ",
        old=" FOR UPDATE",
    ),
    Mutant(
        "what has settled is told what it was told before",
        _CONTINUED + "test_a_result_that_does_not_go_on_from_what_was_posted_changes_nothing[no logprobs]",
        module="horde.lifecycle.store",
        within="def store(",
        old=" if still_runs else _acknowledge_or_classify(tx, job_id, key)",
    ),
    Mutant(
        "a censored result may take back its text",
        _CONTINUED + "test_a_censored_result_may_take_back_its_text[csam]",
        module="horde.lifecycle.store",
        within="def _whole(",
        old="refused = result.state is not ResultState.OK",
        new="refused = False",
    ),
    Mutant(
        "posted logprobs are one a token",
        _CONTINUED + "test_tokens_without_the_logprobs_that_were_asked_for_are_not_taken",
        module="horde.lifecycle.progress",
        within="def take(",
        old="self.wants_logprobs and len(chunk.logprobs or ()) != len(chunk.token_ids)",
        new="False",
    ),
    Mutant(
        "a long output is written less often",
        _CONTINUED + "test_a_long_output_is_written_less_often_and_nothing_of_it_is_lost",
        module="horde.lifecycle.progress",
        within="def take(",
        old=" or self._is_written_too_often()",
    ),
    Mutant(
        "a young lease is left as it is",
        _COSTS + "test_a_post_writes_no_row_that_it_need_not",
        module="horde.lifecycle.progress",
        within="def post_progress(",
        old="held if found[job].due",
        new="held",
    ),
    Mutant(
        "an old lease is renewed",
        _COSTS + "test_a_post_writes_no_row_that_it_need_not",
        module="horde.lifecycle.progress",
        within="LOCK_JOBS = ",
        old=" OR lease_begun < horde_now() - make_interval(secs => %(renew_after)s)",
    ),
    Mutant(
        "tokens count where they are what the text is made of",
        _CHATS + "test_what_a_worker_says_counts_only_where_it_is_what_the_text_is_made_of[junk]",
        module="horde.usecases.submit",
        within="def _count_tokens(",
        old=" and tokenizer.accounts_for(ids, submission.text, prompt_ids=prompt_ids, stop=stop)",
    ),
    Mutant(
        "a prompt that the broker has counted is not too long",
        _CHATS + "test_a_worker_may_say_that_a_prompt_is_too_long_where_the_broker_has_not_counted_it"
        "[False-context_length_exceeded-None]",
        module="horde.usecases.submit",
        within="def _settle(",
        old="code == Rejection.CONTEXT_LENGTH_EXCEEDED and counted",
        new="False",
    ),
    Mutant(
        "who goes on earns for its own tokens",
        _CHATS + "test_who_goes_on_with_a_stream_earns_for_its_own_tokens_and_the_client_pays_for_all",
        module="horde.usecases.pricing",
        within="def price_result(",
        old="if result.prefix_tokens:",
        new="if False:",
    ),
)
