"""Models for chat, as the workers online announce them, and which of a model's revisions counts for how much.

What a worker announced is read with care: a manifest that is none is as if it were not there. Anybody may announce any
revision of any model, so what trusted users answer for comes before what strangers say.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.db.tables.workers import CHAT_ONLINE_SECONDS, SLOW_BELOW
from horde.registry.revisions import Manifest, revision_key

# Threads of one owner count up to so many towards a revision: a number that is only said costs nothing.
MOST_THREADS_AN_OWNER = 20

_COLUMNS = """o.id, o.owner_id, o.trusted, o.threads, o.speed, o.max_length, o.max_context_length,
  o.manifests -> named.model AS manifest, p.context_length AS published_context, t.revision IS NOT NULL AS countable"""

# Both joins are by primary key, once for all workers.
_PUBLISHED = """LEFT JOIN model_revisions p ON p.model = named.model
    AND p.revision = o.manifests -> named.model ->> 'model_revision'
    AND p.tokenizer_revision = o.manifests -> named.model ->> 'tokenizer_revision'
  LEFT JOIN tokenizers t ON t.revision = o.manifests -> named.model ->> 'tokenizer_revision'"""

_ONLINE = """o.last_check_in > horde_now() - make_interval(secs => %(online)s::float)
  AND 'chat' = ANY (o.kinds) AND o.posts_progress AND o.manifests ? named.model"""

SERVING_CHAT = Prepared(f"""
SELECT {_COLUMNS}
FROM worker_offers o JOIN (VALUES (%(model)s::text)) AS named (model) ON named.model = ANY (o.models)
  {_PUBLISHED}
WHERE {_ONLINE} AND (NOT o.maintenance OR o.owner_id = %(user)s::bigint)
ORDER BY o.id
""")

IS_KNOWN = """
SELECT EXISTS (SELECT FROM model_revisions WHERE model = %(model)s)
    OR EXISTS (SELECT FROM worker_offers o WHERE 'chat' = ANY (o.kinds) AND o.manifests ? %(model)s)
"""

ALL_SERVED = f"""
SELECT named.model, extract(epoch FROM w.created_at)::bigint AS created, {_COLUMNS}
FROM worker_offers o JOIN workers w ON w.id = o.id CROSS JOIN LATERAL (SELECT DISTINCT unnest(o.models)) AS named (model)
  {_PUBLISHED}
WHERE {_ONLINE} AND NOT o.maintenance
ORDER BY o.id
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
        published_context: what the revision holds as it was published; None where nobody has published it.
        countable: whether the broker has the tokenizer it names.
    """

    worker_id: uuid.UUID
    owner_id: int
    trusted: bool
    threads: int
    speed: float | None
    max_length: int
    max_context_length: int
    manifest: Manifest
    published_context: int | None
    countable: bool

    @property
    def context_length(self) -> int:
        """The most that it holds of prompt and answer together, in tokens."""
        manifest = self.manifest
        most = min(manifest.context_length, self.max_context_length, manifest.blocks * manifest.block_size)
        return most if self.published_context is None else min(most, self.published_context)

    @property
    def is_slow(self) -> bool:
        """Whether it takes nothing of those who want no slow workers."""
        return self.speed is not None and self.speed < SLOW_BELOW


@dataclass(frozen=True)
class Target:
    """A model at one revision, and the workers online that serve just that; at least one."""

    model: str
    serving: Sequence[Serving]

    @property
    def sized_by(self) -> Sequence[Serving]:
        """Those whose word counts for its lengths: of trusted owners' workers where there are any, else of all."""
        return [worker for worker in self.serving if worker.trusted] or self.serving

    @property
    def manifest(self) -> Manifest:
        """As one of those announces it."""
        return self.sized_by[0].manifest

    @property
    def key(self) -> str:
        """What a request that was counted for this is pinned to."""
        return revision_key(self.model, self.manifest.model_revision, self.manifest.tokenizer_revision)

    @property
    def context_length(self) -> int:
        """The most that one of its workers holds of prompt and answer together, in tokens."""
        return max(worker.context_length for worker in self.sized_by)

    @property
    def standing(self) -> tuple[bool, bool, int]:
        """The greater, the better: whether somebody trusted answers for it, whether its tokens can be counted, its threads."""
        threads: dict[int, int] = defaultdict(int)
        for worker in self.serving:
            threads[worker.owner_id] += worker.threads
        vouched = any(worker.trusted or worker.published_context is not None for worker in self.serving)
        countable = any(worker.countable for worker in self.serving)
        return vouched, countable, sum(min(MOST_THREADS_AN_OWNER, each) for each in threads.values())


@dataclass(frozen=True)
class ChatModel:
    """A model that is served for chat now.

    Attributes:
        created: seconds since the epoch when it was first published, else when the first of its workers came.
        context_length: the most tokens that a chat for it may have, prompt and answer together.
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
    rows = tx.execute(SERVING_CHAT, {"model": model, "user": user_id, "online": CHAT_ONLINE_SECONDS})
    return [worker for row in rows if (worker := _serving(row)) is not None]


def best_target(model: str, serving: Iterable[Serving]) -> Target | None:
    """The revision that a chat is for when these may serve it; None where there is nobody.

    The one that has the highest standing, so that strangers, however many threads they say they have, get a chat only
    where nobody serves it whom somebody trusted answers for. Of two alike it is always the same one.
    """
    groups: dict[str, list[Serving]] = defaultdict(list)
    for worker in serving:
        manifest = worker.manifest
        groups[revision_key(model, manifest.model_revision, manifest.tokenizer_revision)].append(worker)
    targets = (Target(model, group) for _, group in sorted(groups.items()))
    return max(targets, key=lambda target: target.standing, default=None)


def is_known_model(tx: Transaction, model: str) -> bool:
    """Whether anybody has published a revision of it, or a worker that still exists announced it last."""
    return "\0" not in model and bool(tx.execute(IS_KNOWN, {"model": model}).scalar_one())


def list_chat_models(tx: Transaction) -> list[ChatModel]:
    """The models served for chat, by name."""
    serving: dict[str, list[Serving]] = defaultdict(list)
    created: dict[str, int] = {}
    for row in tx.execute(ALL_SERVED, {"online": CHAT_ONLINE_SECONDS}):
        worker = _serving(row)
        if worker is not None:
            serving[row.model].append(worker)
            created[row.model] = min(row.created, created.get(row.model, row.created))
    published = tx.execute(FIRST_PUBLISHED, {"models": list(serving)}) if serving else []
    created |= {row.model: row.created for row in published}
    return [
        ChatModel(
            name=model,
            created=created[model],
            context_length=target.context_length,
            threads=sum(worker.threads for worker in workers),
        )
        for model, workers in sorted(serving.items())
        if (target := best_target(model, workers)) is not None
    ]


def _serving(row: Any) -> Serving | None:
    try:
        manifest = Manifest.from_json(row.manifest)
    except ValueError:
        return None
    return Serving(
        worker_id=row.id,
        owner_id=row.owner_id,
        trusted=row.trusted,
        threads=row.threads,
        speed=row.speed,
        max_length=row.max_length,
        max_context_length=row.max_context_length,
        manifest=manifest,
        published_context=row.published_context,
        countable=row.countable,
    )
