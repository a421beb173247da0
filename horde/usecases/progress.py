"""A worker posts what its jobs have produced so far, or only that it still has them."""

from __future__ import annotations

from collections.abc import Sequence

from horde.admission.keys import User, authenticate, require_registered
from horde.db.database import Transaction
from horde.lifecycle import progress
from horde.lifecycle.progress import Chunk, Progressed
from horde.registry.check_in import go_offline, stay_online
from horde.registry.names import worker_name
from horde.usecases.context import Context

__all__ = ["Chunk", "Progressed", "post_progress"]


def post_progress(
    context: Context, api_key: str, worker: str, chunks: Sequence[Chunk], *, leaving: bool = False
) -> list[Progressed]:
    """Keep the leases of these jobs alive and what is new of their output; one answer a job, the last one of a job named twice.

    The worker counts as online with it, also without any job; with `leaving` it is offline until its next pop. A job that
    isn't the caller's is answered `stale`.

    Raises:
        HordeError: 401; 403 for the anonymous account and for a worker that isn't the caller's.
    """

    def known(tx: Transaction) -> User:
        user = authenticate(tx, api_key)
        require_registered(user)
        presence = go_offline if leaving else stay_online
        presence(tx, user.id, worker_name(worker, field="worker"))
        return user

    def vocabulary(revision: str) -> int | None:
        tokenizer = context.tokenizers.loaded(revision)
        return None if tokenizer is None else tokenizer.vocabulary

    user = context.database.read(known)
    if not chunks:
        return []
    lease = context.terms.lease(max_length=0, tokens_per_second=None, posts_progress=True)
    answers = context.database.run(
        lambda tx: progress.post_progress(tx, user.id, chunks, lease=lease, vocabulary=vocabulary)
    )
    context.streams.announce({answer.announce for answer in answers if answer.announce is not None})
    return list({answer.job_id: answer for answer in answers}.values())
