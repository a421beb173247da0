"""A broker's routes over real HTTP, with faults on demand: what a worker meets when things go wrong.

Jobs are claimed once and answered again for a repeated key, as a broker does, and what is posted of an attached one is
put together by its offsets. With `native` off it is AI Horde's own: it hands out one job at a time, and has no routes for
progress, chat or models. Nothing here sleeps: a test waits for what it wants to see
with `wait_until`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import urllib.parse
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 20.0
POP, SUBMIT, FIND_USER = "/api/v2/generate/text/pop", "/api/v2/generate/text/submit", "/api/v2/find_user"
PROGRESS = "/api/v2/generate/progress"
CHAT_POP, CHAT_SUBMIT = "/api/v2/generate/chat/pop", "/api/v2/generate/chat/submit"
# Stands for all routes of the register of models.
REGISTRY = "/api/v2/models"
_NO_ROUTE = {"message": "The requested URL was not found on the server."}


@dataclass(frozen=True)
class Answer:
    """A fault: this answer instead of the right one."""

    status: int
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


class Fault:
    """Faults of the connection."""

    RESET = "reset before the request is acted upon"
    LOST = "acted upon, but the answer is lost"
    TWICE = "acted upon, and then once more"


@dataclass(frozen=True)
class Call:
    path: str
    body: dict[str, Any]
    key: str
    headers: dict[str, str]
    method: str = "POST"


@dataclass
class Held:
    """What the broker has of a slot."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)

    def copy(self) -> Held:
        return Held(list(self.token_ids), self.text, list(self.logprobs))

    def take(self, chunk: dict[str, Any]) -> None:
        """What of a chunk follows on what is here; all else is dropped."""
        offset, text_offset = chunk.get("offset", 0), chunk.get("text_offset", 0)
        here, characters = len(self.token_ids), len(self.text)
        fresh = chunk.get("token_ids", [])[max(0, here - offset) :]
        if offset > here or text_offset > characters or not fresh:
            return
        self.token_ids += fresh
        self.text += chunk["text"][characters - text_offset :]
        self.logprobs += chunk.get("logprobs", [])[here - offset :]


class PlayedBroker:
    """State that outlives its server, so that a broker can be stopped and started again."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.jobs: deque[dict[str, Any]] = deque()
        self.calls: list[Call] = []
        self.settled: dict[str, dict[str, Any]] = {}
        self.forgotten: set[str] = set()
        self.native = self.serves_chat = True
        self.claimed: set[str] = set()
        self.entries: dict[str, dict[str, Any]] = {}
        self.held: dict[str, Held] = {}
        self.seen: dict[str, list[Held]] = {}
        self.published: dict[str, Any] = {}
        self.stops: dict[str, str] = {}
        self.ttl = 60
        routes = (POP, SUBMIT, PROGRESS, FIND_USER, CHAT_POP, CHAT_SUBMIT, REGISTRY)
        self.faults: dict[str, deque[Answer | str]] = {route: deque() for route in routes}
        self._answers: dict[str, dict[str, Any]] = {}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._port = 0
        self._stopping = self._closing = False
        self._open: set[socket.socket] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen; after a stop, on the same port again."""
        self._stopping = False
        handler = type("Handler", (_Handler,), {"broker": self})
        self._server = _Server(("127.0.0.1", self._port), handler)
        self._port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and cut every connection, with calls under way unanswered."""
        if self._server is None or self._thread is None:
            return
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        self._server.shutdown()
        with self.changed:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()
        self._server = self._thread = None

    def close_up(self) -> None:
        """Keep nobody waiting, hand out nothing, and take what comes back."""
        with self.changed:
            self._closing = True
            for faults in self.faults.values():
                faults.clear()
            self.changed.notify_all()

    def give(self, job_id: str, prompt: str = "hello", *, cache_salt: str | None = None, **payload: Any) -> None:
        """Queue a job."""
        self.give_at_once(job_id, prompt=prompt, cache_salt=cache_salt, **payload)

    def give_at_once(self, *job_ids: str, prompt: str = "hello", cache_salt: str | None = None, **payload: Any) -> None:
        """Queue several that one pop may take together."""
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        with self.changed:
            for job_id in job_ids:
                self.jobs.append({"id": job_id, **salt, "payload": {"prompt": prompt, "n": 1, **payload}})
            self.changed.notify_all()

    def give_chat(self, job_id: str, *, prefix: str = "", attached: bool = True, **changes: Any) -> None:
        """Queue a chat; `changes` are of its payload. Ids of a prefix are its characters' numbers."""
        entry = {
            name: changes.pop(name)
            for name in ("model_revision", "tokenizer_revision", "cache_salt", "seed")
            if name in changes
        }
        payload = {
            "messages": [{"role": "user", "content": "hello"}], "prompt": "<user>hello", "prompt_token_ids": [1, 2, 3],
            "prompt_tokens": 3, "estimated": False, "max_new_tokens": 100, "stop": [], "logprobs": None,
            "sampling": {}, "tools": None, "response_format": None, **changes,
        }  # fmt: skip
        with self.changed:
            self.jobs.append(
                {
                    "id": job_id,
                    "kind": "chat",
                    "attached": attached,
                    "deadline": None,
                    "payload": payload,
                    "prefix_text": prefix,
                    "prefix_token_ids": [ord(c) for c in prefix],
                    **entry,
                }
            )
            self.changed.notify_all()

    def stop_job(self, job_id: str, reason: str) -> None:
        """Settle a job without its worker, which hears of it with its next post."""
        with self.changed:
            self.stops[job_id] = reason
            self.forgotten.add(job_id)

    def fail(self, path: str, *faults: Answer | str) -> None:
        """The next calls of this route fail so."""
        with self.changed:
            self.faults[path].extend(faults)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE), f"never happened; the last calls: {self.calls[-8:]}"

    def made(self, path: str) -> list[Call]:
        return [call for call in self.calls if call.path == path]

    def pops(self) -> list[Call]:
        """Of either kind."""
        return [call for call in self.calls if call.path in {POP, CHAT_POP}]

    def told_of(self, job_id: str) -> list[dict[str, Any]]:
        """What the posts say of a job."""
        return [job for call in self.made(PROGRESS) for job in call.body["jobs"] if job["id"] == job_id]

    def stages(self) -> list[dict[str, str]]:
        """Of each post: job -> the state it is said to be in."""
        return [{job["id"]: job["state"] for job in call.body["jobs"]} for call in self.made(PROGRESS)]

    def states(self) -> dict[str, str]:
        """Job -> the state it was settled with."""
        return {job_id: body["state"] for job_id, body in self.settled.items()}

    def _next_fault(self, path: str) -> Answer | str | None:
        return self.faults[path].popleft() if self.faults[path] else None

    def answer(self, call: Call) -> tuple[Answer | None, str | None]:
        """The answer, and the connection's fault."""
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()
            fault = self._next_fault(REGISTRY if _is_registry(call.path) else call.path)
            if isinstance(fault, Answer):
                return fault, None
            if fault == Fault.RESET:
                return None, fault
            if call.path == FIND_USER:
                return Answer(200, {"username": "owner#1"}), fault
            if call.path == PROGRESS:
                if fault == Fault.TWICE:
                    self._progress(call.body)
                return self._progress(call.body), None if fault == Fault.TWICE else fault
            if not (self.native and self.serves_chat) and call.path not in {POP, SUBMIT}:
                return Answer(404, _NO_ROUTE), fault
            if _is_registry(call.path):
                return self._registry(call), fault
            if call.key not in self._answers:
                pop = call.path in {POP, CHAT_POP}
                answer = self._pop(call.body) if pop else self._submit(call.path, call.body)
                if isinstance(answer, Answer):
                    return answer, fault
                self._answers[call.key] = answer
            return Answer(200, self._answers[call.key]), fault

    def _pop(self, body: dict[str, Any]) -> dict[str, Any] | Answer:
        wait = 0.0 if self._closing else float(body.get("wait", 0))
        self.changed.wait_for(lambda: bool(self.jobs) or self._stopping or self._closing, wait)
        if self._stopping:
            return Answer(503, {"message": "shutting down"})
        empty = {"payload": {"max_length": 80}, "id": None, "ids": [], "model": None, "messages": [], "skipped": {}}
        if not self.jobs or self._closing:
            return empty
        count = body.get("slots", 1) if self.native else 1
        jobs = [
            {"model": body["models"][0], "ttl": 150, **self.jobs.popleft()} for _ in range(min(count, len(self.jobs)))
        ]
        for job in jobs:
            self.claimed.add(job["id"])
            self.entries[job["id"]] = job
            self.held[job["id"]] = Held(list(job.get("prefix_token_ids", [])), job.get("prefix_text", ""))
        several = {"jobs": jobs} if self.native else {}
        return {**empty, "ids": [jobs[0]["id"]], **several, **jobs[0]}

    def _progress(self, body: dict[str, Any]) -> Answer:
        if not self.native:
            return Answer(404, _NO_ROUTE)
        kept, stop = [], []
        for job in body["jobs"]:
            job_id = job["id"]
            if job_id in self.stops or job_id not in self.claimed or job_id in self.settled:
                stop.append({"id": job_id, "reason": self.stops.get(job_id, "stale")})
            else:
                held = self.held[job_id]
                held.take(job)
                self.seen.setdefault(job_id, []).append(held.copy())
                kept.append({"id": job_id, "accepted": len(held.token_ids), "ttl": self.ttl})
        return Answer(200, {"jobs": kept, "stop": stop})

    def _registry(self, call: Call) -> Answer:
        path = urllib.parse.unquote(call.path)
        if call.method == "PUT":
            self.published[path] = call.body
            self.changed.notify_all()
            return Answer(201, {})
        return Answer(200, self.published[path]) if path in self.published else Answer(404, {"rc": "NotFound"})

    def _submit(self, path: str, body: dict[str, Any]) -> dict[str, Any] | Answer:
        job_id = body["id"]
        kind = self.entries[job_id].get("kind", "text") if job_id in self.entries else "text"
        if job_id in self.entries and f"/{kind}/" not in path:
            return Answer(400, {"message": f"this is a {kind} job", "rc": "InvalidJobID"})
        if job_id in self.forgotten:
            return Answer(404, {"message": f"Processing Job with ID {job_id} does not exist.", "rc": "InvalidJobID"})
        if job_id in self.settled:
            return Answer(400, {"message": "already submitted", "rc": "DuplicateGen"})
        held = self.held.get(job_id, Held())
        ids, text = body.get("token_ids", held.token_ids), body["generation"]
        if body["state"] == "ok" and not (text.startswith(held.text) and ids[: len(held.token_ids)] == held.token_ids):
            return Answer(400, {"message": "this is not how it began", "rc": "Contradicted"})
        self.settled[job_id] = body
        self.changed.notify_all()
        return {"reward": 1.5}


def _is_registry(path: str) -> bool:
    return path.startswith(("/api/v2/models/", "/api/v2/tokenizers/"))


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A worker that hangs up is part of the play."""


class _Handler(BaseHTTPRequestHandler):
    broker: PlayedBroker
    protocol_version = "HTTP/1.1"
    # Head and body are two writes, and the second would wait for the other side's word on the first.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.broker.changed:
            self.broker._open.add(self.connection)

    def finish(self) -> None:
        with self.broker.changed:
            self.broker._open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_PUT(self) -> None:
        self.do_POST()

    def _reply(self, body: dict[str, Any]) -> None:
        call = Call(self.path, body, self.headers.get("Idempotency-Key", ""), dict(self.headers), self.command)
        answer, fault = self.broker.answer(call)
        if fault is not None or answer is None:
            self._reset()
            return
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
