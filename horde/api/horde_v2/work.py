"""A worker's calls, as the routes of every kind make them: an offer read off a body, a result read off another."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from flask import request

from horde.api.address import client_address
from horde.api.broker import context, stopping
from horde.api.horde_v2.pop_bodies import ManifestBody, WorkerPop
from horde.api.horde_v2.text_bodies import TextSubmit
from horde.api.identity import idempotency_key, job_id_or_404, required_key
from horde.api.undelivered import if_undelivered
from horde.usecases.hand_out import hand_back
from horde.usecases.pop import Manifest, Offer, Popped, pop
from horde.usecases.submit import Submission


def popped_for(body: WorkerPop, kinds: Sequence[str]) -> Popped:
    """What the caller is given, of these kinds; raises HordeError."""
    key = required_key()
    offer = Offer(
        name=body.name,
        models=body.models,
        max_length=body.max_length,
        max_context_length=body.max_context_length,
        kinds=kinds,
        manifests={model: _manifest(manifest) for model, manifest in body.manifests.items()},
        threads=body.threads,
        amount=body.amount,
        slots=body.slots,
        progress=body.progress,
        nsfw=body.nsfw,
        priority_usernames=body.priority_usernames,
        bridge_agent=body.bridge_agent,
        wait=body.wait,
        idempotency_key=idempotency_key(),
        address=client_address(),
    )
    disconnected = request.environ.get("waitress.client_disconnected", lambda: False)
    popped = pop(context(), key, offer, client_gone=lambda: disconnected() or stopping())
    if popped.jobs and offer.idempotency_key is None:
        # With a key the worker asks again and gets these jobs; without one nobody else will ever know their ids.
        if_undelivered(functools.partial(hand_back, context(), popped.jobs))
    return popped


def submission_of(body: TextSubmit) -> Submission:
    """What a worker says of its job; raises HordeError 404 for what is no id."""
    return Submission(
        job_id=job_id_or_404(body.id),
        state=body.state,
        text=body.generation or "",
        seed=body.seed,
        gen_metadata=[note.model_dump(exclude_none=True) for note in body.gen_metadata],
        finish_reason=body.finish_reason,
        token_ids=body.token_ids,
        error_code=body.error_code,
        idempotency_key=idempotency_key(),
    )


def _manifest(body: ManifestBody) -> Manifest:
    return Manifest(
        model_revision=body.model_revision,
        tokenizer_revision=body.tokenizer_revision,
        context_length=body.context_length,
        block_size=body.block_size,
        blocks=body.blocks,
        kv_bytes_per_token=body.kv_bytes_per_token,
        capabilities=tuple(body.capabilities),
    )
