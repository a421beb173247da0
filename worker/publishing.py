"""Publishes the served model's tokenizer and revision, in a thread of its own: then the broker counts and renders prompts by
itself. Only trusted workers may; without it everything works, and prompts are counted by estimate.
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

from worker.backoff import Pace
from worker.broker import BrokerClient, BrokerUnavailableError, NotPublishedError
from worker.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """What there is to tell of one model.

    Args:
        model: the name it is served under.
        tokenizer: canonical JSON, of which `manifest.tokenizer_revision` is the hash.
        context_length: most tokens that the model itself reads, however little this worker's cache holds.
        probe: a sample run; None if there was none.
    """

    model: str
    manifest: Manifest
    tokenizer: bytes
    context_length: int
    probe: dict[str, Any] | None

    def model_body(self) -> bytes:
        """What is published of the model's revision, as JSON."""
        manifest = self.manifest
        body = {
            "context_length": self.context_length,
            "block_size": manifest.block_size,
            "kv_bytes_per_token": manifest.kv_bytes_per_token,
            "tokenizer_revision": manifest.tokenizer_revision,
            "capabilities": list(manifest.capabilities),
            **({"probe": self.probe} if self.probe is not None else {}),
        }
        return json.dumps(body).encode("ascii")


class Publisher(threading.Thread):
    """Publishes once, what the broker does not have yet, and ends; an outage is waited out.

    Args:
        client: this thread's own.
        pace: its backoff is used.
    """

    def __init__(self, client: BrokerClient, publication: Publication, *, pace: Pace = Pace()) -> None:  # noqa: B008  frozen
        super().__init__(name="publisher", daemon=True)
        self._client = client
        self._publication = publication
        self._backoff = pace.backoff()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Try nothing more."""
        self._stopping.set()

    def run(self) -> None:
        """The thread."""
        try:
            while not self._stopping.is_set() and not self._is_done():
                pass
        except NotPublishedError as error:
            # Known by its hash and refused all the same, or not ours to publish: neither gets better by trying.
            level = logging.WARNING if error.permitted else logging.INFO
            log.log(level, "%s is not published: %s", self._publication.model, error)
        except Exception:
            log.exception("publishing %s broke", self._publication.model)
        finally:
            self._client.close()

    def _is_done(self) -> bool:
        """One try, and after an outage a pause."""
        try:
            self._publish()
        except BrokerUnavailableError as error:
            delay = self._backoff.next(error.retry_after)
            log.info("%s is not published yet (%s); trying again in %.1f s", self._publication.model, error, delay)
            self._stopping.wait(delay)
            return False
        return True

    def _publish(self) -> None:
        told, manifest = self._publication, self._publication.manifest
        if not self._client.has_tokenizer(manifest.tokenizer_revision):
            self._client.put_tokenizer(manifest.tokenizer_revision, told.tokenizer)
            log.info("the tokenizer of %s is published", told.model)
        if not self._client.has_model_revision(told.model, manifest.model_revision):
            self._client.put_model_revision(told.model, manifest.model_revision, told.model_body())
            log.info("%s is published as revision %s", told.model, manifest.model_revision)
