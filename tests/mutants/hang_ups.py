"""The guards of connections that wait at `/v1`: that a hang-up, a deadline, a full house and a repeat end as they should."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ATTACHED = "tests/integration/test_attachments.py::"
_HANG_UPS = "tests/integration/test_chat_disconnects.py::"
_DEADLINES = "tests/integration/test_chat_deadlines.py::"
_FULL = "tests/integration/test_chat_full_house.py::"
_KEYS = "tests/integration/test_chat_idempotency.py::"
_RESTART = "tests/integration/test_chat_restart.py::"

HANG_UPS = (
    Mutant(
        "who goes takes its request along",
        _HANG_UPS + "test_what_waits_for_its_next_worker_is_dropped_and_costs_nothing",
        module="horde.usecases.chat_stream",
        old="        held.callback(chat.leave)\n",
    ),
    Mutant(
        "a hang-up wakes who waits",
        _HANG_UPS + "test_a_worker_is_told_with_its_next_post",
        module="horde.api.openai_v1.delivery",
        old="        if_gone(chat.wake)\n",
    ),
    Mutant(
        "a whole answer looks whether its client is there",
        _HANG_UPS + "test_what_runs_ends_with_what_was_posted_and_its_worker_is_told[in_the_middle-False]",
        module="horde.usecases.chat_stream",
        old="while not self._client_gone():",
        new="while True:",
    ),
    Mutant(
        "a place is given back",
        _FULL + "test_one_more_is_refused_and_gets_in_once_somebody_has_left",
        module="horde.usecases.places",
        old="self._taken -= 1",
        new="pass",
    ),
    Mutant(
        "no more wait than there are places",
        _FULL + "test_one_more_is_refused_and_gets_in_once_somebody_has_left",
        module="horde.usecases.places",
        old="self._taken < self.most and ",
    ),
    Mutant(
        "who waits does not wait for maintenance to find its deadline",
        _DEADLINES + "test_one_that_passes_in_the_queue_ends_what_nobody_took",
        module="horde.usecases.chat_stream",
        old="            self._end_at_deadline()\n",
    ),
    Mutant(
        "a deadline that cannot be met is refused",
        _DEADLINES + "test_one_that_cannot_be_met_is_refused_before_anything_is_queued[True]",
        module="horde.usecases.chat_admission",
        within="def _check_deadline(",
        old="if wait > seconds:",
        new="if False:",
    ),
    Mutant(
        "a repeat counts as one more that waits",
        _KEYS + "test_who_leaves_first_leaves_it_to_the_others_and_the_last_one_gives_it_up",
        module="horde.usecases.chat_stream",
        old=" or context.database.run(partial(join, request_id=request_id))",
        new=" or True",
    ),
    Mutant(
        "what has just been given up is not joined",
        _KEYS + "test_who_comes_as_the_last_one_leaves_gets_an_answer",
        module="horde.usecases.chat_stream",
        old="        ended = request_id\n",
        new="        return admitted\n",
    ),
    Mutant(
        "what was given up is no answer to a repeat",
        _KEYS + "test_what_its_client_gave_up_is_no_answer_and_the_repeat_an_order_of_its_own",
        module="horde.usecases.chat_admission",
        old=" and not _was_abandoned(tx, answer)",
    ),
    Mutant(
        "a broker that shuts down does not count as waiting any more",
        _RESTART + "test_whoever_came_back_gives_it_up_by_hanging_up",
        module="horde.usecases.chat_stream",
        old="                self._context.database.run(lambda tx: let_go(tx, self.id))\n",
    ),
    Mutant(
        "a broker that shuts down gives nothing up",
        _RESTART + "test_a_stream_whose_broker_shuts_down_goes_on_elsewhere_with_the_same_request",
        module="horde.usecases.chat_stream",
        within="    def leave(",
        old="if self._context.streams.closed:",
        new="if False:",
    ),
    Mutant(
        "who is let go of has the whole term to come back",
        _ATTACHED + "test_whom_a_broker_lets_go_of_has_the_whole_term_to_come_back_and_is_not_waited_for",
        module="horde.lifecycle.attach",
        within="LET_GO = ",
        old="make_interval(secs => %(attached_for)s)",
        new="interval '0'",
    ),
    Mutant(
        "nobody is let go of who does not wait",
        _ATTACHED + "test_whom_a_broker_lets_go_of_has_the_whole_term_to_come_back_and_is_not_waited_for",
        module="horde.lifecycle.attach",
        within="LET_GO = ",
        old=" AND attached_by > 0",
    ),
    Mutant(
        "letting go of what has ended changes nothing",
        _ATTACHED + "test_letting_go_after_the_end_changes_nothing",
        module="horde.lifecycle.attach",
        within="LET_GO = ",
        old=" AND outcome IS NULL",
    ),
)
