"""The guards of streams and notices: nothing twice, nothing left out, nobody forgotten."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STREAMS = "tests/integration/test_streams.py::"
_HUB = "tests/integration/test_stream_hub.py::"
_NOTICES = "tests/integration/test_notices.py::"

STREAMS = (
    Mutant(
        "what earlier attempts left counts until the next one has posted",
        _STREAMS + "test_the_next_attempt_goes_on_where_the_last_one_stopped",
        module="horde.streams.output",
        old="substr(coalesce(held.text, s.prefix_text, '')",
        new="substr(coalesce(held.text, '')",
    ),
    Mutant(
        "logprobs are counted from what was given",
        _STREAMS + "test_logprobs_come_with_their_tokens",
        module="horde.streams.output",
        old="jsonb_build_object('given', asked.tokens)",
        new="jsonb_build_object('given', 0)",
    ),
    Mutant(
        "a withheld result adds nothing to a stream",
        _STREAMS + "test_a_result_that_is_withheld_adds_nothing_to_what_was_posted",
        module="horde.streams.output",
        old="j.result_state <> 'ok' AS withheld",
        new="false AS withheld",
    ),
    Mutant(
        "nobody is read for who has not taken what lies there",
        _HUB + "test_a_client_that_does_not_take_its_output_is_not_read_for",
        module="horde.streams.hub",
        within="    def _mark_one",
        old="if follower.output is None:",
        new="if True:",
    ),
    Mutant(
        "what was announced while output lay there is read for afterwards",
        _HUB + "test_a_client_that_does_not_take_its_output_is_not_read_for",
        module="horde.streams.hub",
        old="elif self.stale and not self.ended:",
        new="elif False:",
    ),
    Mutant(
        "a follower is stale again from before the read",
        _HUB + "test_what_is_announced_during_a_read_is_read_for_after_it",
        module="horde.streams.hub",
        within="    def _read_for",
        old="        if failing:\n",
        new="        with self._lock:\n            self._wanted.clear()\n        if failing:\n",
    ),
    Mutant(
        "followers are read for again after an outage",
        _HUB + "test_streams_go_on_after_an_outage_of_the_database_with_nothing_lost",
        module="horde.streams.hub",
        within="            with self._lock:\n                for follower in followers:\n                    self._mark_one(follower)",
        old="self._mark_one(follower)",
        new="follower.ended = True",
    ),
    Mutant(
        "whoever follows keeps its request attached",
        _HUB + "test_followed_requests_stay_attached_however_long_a_read_takes",
        module="horde.streams.hub",
        within="    def _renew_on",
        old="self._renew(followed)",
        new="pass",
    ),
    Mutant(
        "an announcement is told to other processes",
        _HUB + "test_what_a_worker_posts_to_one_broker_a_client_of_another_is_given[database]",
        module="horde.streams.hub",
        old="self._notices.tell(CHANNEL, keys)",
        new="pass",
    ),
    Mutant(
        "a process does not hear itself",
        _NOTICES + "test_words_reach_every_other_process_on_their_channel_and_never_their_own[database]",
        module="horde.db.notices",
        old="if notice.pid != connection.info.backend_pid:",
        new="if True:",
    ),
    Mutant(
        "words that did not go out are kept",
        _NOTICES + "test_words_told_while_the_database_is_away_come_when_it_is_back",
        module="horde.db.notices",
        within="    def tell",
        old="fresh[word] = None",
        new="fresh.update({word: None} if self.listening.is_set() else {})",
    ),
)
