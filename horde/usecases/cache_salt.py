"""The salt under which a worker keeps what it computed of a prompt: one per tenant, so that no tenant finds another one's."""

from __future__ import annotations

import hashlib
import uuid


def cache_salt(tenant: str, worker_id: uuid.UUID) -> str:
    """32 hexadecimal digits: the same for each prompt of a tenant at one worker.

    A keyed BLAKE2b, so that the tenant cannot be found from it; another worker gets another one, so that two workers cannot
    tell that they serve the same user.

    Args:
        tenant: a secret of the tenant's, as `horde.lifecycle.claim.TENANT` reads it; at most 64 characters.
    """
    return hashlib.blake2b(worker_id.bytes, key=tenant.encode(), digest_size=16, person=b"cache salt").hexdigest()
