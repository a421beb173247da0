"""Models for chat, as the workers online announce them.

What a worker announced is read with care: a manifest that is none is as if it were not there.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.db.tables.workers import ONLINE_SECONDS, SLOW_BELOW
from horde.registry.revisions import Manifest, revision_key

_ONLINE = """o.last_check_in > horde_now() - make_interval(secs => %(online)s::float)
  AND 'chat' = ANY (o.kinds) AND o.posts_progress"""

SERVING_CHAT = Prepared(f"""
SELECT o.id, o.trusted, o.threads, o.speed, o.max_length, o.max_context_length, o.manifests -> %(model)s::text AS manifest
FROM worker_offers o
WHERE {_ONLINE} AND %(model)s::text = ANY (o.models) AND o.manifests ? %(model)s::text
  AND (NOT o.maintenance OR o.owner_id = %(user)s::bigint)
ORDER BY o.id
""")

IS_KNOWN = """
SELECT EXISTS (SELECT FROM model_revisions WHERE model = %(model)s)
    OR EXISTS (SELECT FROM worker_offers o WHERE 'chat' = ANY (o.kinds) AND o.manifests ? %(model)s)
"""

ALL_SERVED = f"""
SELECT o.models, o.threads, o.max_context_length, o.manifests, extract(epoch FROM w.created_at)::bigint AS created
FROM worker_offers o JOIN workers w ON w.id = o.id
WHERE {_ONLINE} AND NOT o.maintenance
"""

FIRST_PUBLISHED = """
SELECT model, extract(epoch FROM min(created_at))::bigint AS created FROM model_revisions
WHERE model = ANY (%(models)s) GROUP BY model
"""


@dataclass(frozen=True)
class Serving:
    """A worker online that takes chats for a model. Lengths are in tokens.

    Attributes:
        speed: tokens per second, as measured; None before it has done anything.
        max_length, max_context_length: what it takes, whatever the model could.
    """

    worker_id: uuid.UUID
    trusted: bool
    threads: int
    speed: float | None
    max_length: int
    max_context_length: int
    manifest: Manifest

    @property
    def is_slow(self) -> bool:
        """Whether it takes nothing of those who want no slow workers."""
        return self.speed is not None and self.speed < SLOW_BELOW


@dataclass(frozen=True)
class ChatModel:
    """A model that is served for chat now.

    Attributes:
        created: seconds since the epoch when it was first published, else when the first of its workers came.
        context_length: the most tokens that a worker of its most served revision takes.
        threads: of all its workers, whatever their revision.
    """

    name: str
    created: int
    context_length: int
    threads: int


def serving_chat(tx: Transaction, model: str, *, user_id: int) -> list[Serving]:
    """The workers online that would take a chat of this user for the model.

    One in maintenance works for its owner only.
    """
    if "\0" in model:
        return []
    rows = tx.execute(SERVING_CHAT, {"model": model, "user": user_id, "online": ONLINE_SECONDS})
    return [
        Serving(row.id, row.trusted, row.threads, row.speed, row.max_length, row.max_context_length, manifest)
        for row in rows
        if (manifest := _manifest(row.manifest)) is not None
    ]


def is_known_model(tx: Transaction, model: str) -> bool:
    """Whether anybody has published a revision of it, or a worker that still exists announced it last."""
    return "\0" not in model and bool(tx.execute(IS_KNOWN, {"model": model}).scalar_one())


@dataclass
class _Tally:
    created: int
    threads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    context: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def list_chat_models(tx: Transaction) -> list[ChatModel]:
    """The models served for chat, by name."""
    tallies: dict[str, _Tally] = {}
    for row in tx.execute(ALL_SERVED, {"online": ONLINE_SECONDS}):
        manifests = row.manifests if isinstance(row.manifests, Mapping) else {}
        for model in set(row.models):
            manifest = _manifest(manifests.get(model))
            if manifest is None:
                continue
            tally = tallies.setdefault(model, _Tally(row.created))
            key = revision_key(model, manifest.model_revision, manifest.tokenizer_revision)
            tally.created = min(tally.created, row.created)
            tally.threads[key] += row.threads
            tally.context[key] = max(tally.context[key], min(manifest.context_length, row.max_context_length))
    published = tx.execute(FIRST_PUBLISHED, {"models": list(tallies)}) if tallies else []
    first = {row.model: row.created for row in published}
    return [
        ChatModel(
            name=model,
            created=first.get(model, tally.created),
            # Of two that are served alike the one that admission takes, too.
            context_length=tally.context[max(sorted(tally.threads), key=tally.threads.__getitem__)],
            threads=sum(tally.threads.values()),
        )
        for model, tally in sorted(tallies.items())
    ]


def _manifest(given: Any) -> Manifest | None:
    try:
        return Manifest.from_json(given)
    except ValueError:
        return None
