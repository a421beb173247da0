"""Tokenizers by their revision: the SHA-256 of what they are. Each is stored once, stays as it is, and is loaded by every
broker process when a request first needs it.

The canonical form of one is JSON of ASCII characters only, keys sorted, nothing between them, so that whoever computes the
hash gets the same one. It holds `chat_template`, `special_tokens` and `tokenizer` (the content of a `tokenizer.json`).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import zlib
from collections import OrderedDict
from typing import Any, NoReturn

import structlog

from horde.db.database import Database, Transaction
from horde.errors import HordeError, bad_request
from horde.registry.chat_tokenizer import ChatTokenizer, TokenizerError
from horde.registry.templates import ChatTemplate, TemplateError, is_token_name
from horde.registry.tokenizer_limits import check_parts

MAX_TOKENIZER_BYTES = 32 << 20
MAX_DEPTH = 64
# A large vocabulary has 600,000 merges, each a list.
MOST_BRACKETS = 4_000_000
MOST_SPECIAL_TOKENS = 64
LONGEST_SPECIAL_TOKEN = 256
# Seconds in which an unknown revision is not looked for again; another process may be told of it meanwhile.
UNKNOWN_FOR = 5.0
_MOST_UNKNOWN = 1000
_REVISION = re.compile(r"[0-9a-f]{64}")
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_TEMPLATE, _SPECIAL, _TOKENIZER = '{"chat_template":', ',"special_tokens":', ',"tokenizer":'
log = structlog.get_logger("horde.registry")

STORE = """
INSERT INTO tokenizers (revision, body, published_by, created_at) VALUES (%(revision)s, %(body)s, %(user)s, horde_now())
ON CONFLICT (revision) DO NOTHING
"""
READ = "SELECT body FROM tokenizers WHERE revision = %(revision)s"
EXISTS = "SELECT EXISTS (SELECT FROM tokenizers WHERE revision = %(revision)s)"


def is_tokenizer_revision(text: str) -> bool:
    """Whether this is a SHA-256 in lower-case hexadecimal digits."""
    return _REVISION.fullmatch(text) is not None


def tokenizer_revision(canonical: bytes) -> str:
    """The revision of a canonical form."""
    return hashlib.sha256(canonical).hexdigest()


def store_tokenizer(tx: Transaction, user_id: int, canonical: bytes, compressed: bytes) -> bool:
    """Keep a tokenizer; False when it is there already."""
    row = {"revision": tokenizer_revision(canonical), "body": compressed, "user": user_id}
    return tx.execute(STORE, row).rowcount == 1


def has_tokenizer(tx: Transaction, revision: str) -> bool:
    """Whether a tokenizer is stored."""
    return is_tokenizer_revision(revision) and bool(tx.execute(EXISTS, {"revision": revision}).scalar_one())


def read_tokenizer(tx: Transaction, revision: str) -> bytes | None:
    """A stored tokenizer, compressed (zlib)."""
    if not is_tokenizer_revision(revision):
        return None
    body = tx.execute(READ, {"revision": revision}).scalar_one_or_none()
    return None if body is None else bytes(body)


def canonical_form(body: bytes) -> bytes:
    """The canonical form of a body as somebody sent it: JSON of any form, in which of a repeated key the last value counts.

    Raises:
        HordeError: 400, it is no JSON, or a field is not of its type or asks for too much; names the field.
    """
    given = _parse(body)
    if not isinstance(given, dict):
        raise bad_request("A tokenizer has to be a JSON object.")
    tokenizer, template, special = given.get("tokenizer"), given.get("chat_template"), given.get("special_tokens", {})
    if not isinstance(tokenizer, dict):
        _refuse("tokenizer", "has to be the content of a tokenizer.json, as an object")
    if template is not None and not isinstance(template, str):
        _refuse("chat_template", "has to be a text or null")
    _check_special_tokens(special)
    known = {"tokenizer": tokenizer, "chat_template": template, "special_tokens": special}
    if _is_deeper(known, MAX_DEPTH):
        _refuse("tokenizer", f"is nested deeper than {MAX_DEPTH} levels")
    check_parts(tokenizer)
    for field, text in (
        ("chat_template", template or ""),
        *((f"special_tokens.{name}", special[name]) for name in special),
    ):
        if _HALF_A_PAIR.search(text):
            _refuse(field, "must not contain half of a surrogate pair")
    try:
        canonical = json.dumps(
            known, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
        ).encode()
    except ValueError:
        _refuse("tokenizer", "holds a number that does not fit")
    if len(canonical) > MAX_TOKENIZER_BYTES:
        raise bad_request(
            f"The tokenizer's canonical form is larger than {MAX_TOKENIZER_BYTES} bytes.", field="tokenizer"
        )
    return canonical


def load_canonical(canonical: bytes) -> ChatTokenizer:
    """What a canonical form describes.

    Raises:
        HordeError: 400 that names the field which cannot be used.
    """
    text = canonical.decode()
    decode = json.JSONDecoder().raw_decode
    template, end = decode(text, len(_TEMPLATE))
    special, end = decode(text, end + len(_SPECIAL))
    # The rest is the tokenizer, the largest part by far, which its own library reads much faster.
    content = canonical[end + len(_TOKENIZER) : -1]
    try:
        compiled = None if template is None else ChatTemplate(template, special)
    except TemplateError as error:
        _refuse("chat_template", error.message)
    try:
        return ChatTokenizer(content, compiled)
    except TokenizerError as error:
        _refuse("tokenizer", f"cannot be loaded: {error}")


class Tokenizers:
    """The tokenizers that this process has loaded, of which the `most` that were used last stay."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, ChatTokenizer] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._loading: dict[str, threading.Lock] = {}

    def load(self, database: Database, revision: str) -> ChatTokenizer | None:
        """The tokenizer of this revision; None when nobody has published it.

        Threads that want the same one wait for one of them to load it, without a connection.

        Raises:
            HordeError: 503, the database cannot be reached.
        """
        if not is_tokenizer_revision(revision):
            return None
        found, certain = self._look_up(revision)
        if certain:
            return found
        with self._lock:
            turn = self._loading.setdefault(revision, threading.Lock())
        with turn:
            found, certain = self._look_up(revision)
            return found if certain else self._load(database, revision)

    def loaded(self, revision: str) -> ChatTokenizer | None:
        """The tokenizer of this revision where this process has it at hand; never waits."""
        return self._look_up(revision)[0]

    def forget_unknown(self, revision: str) -> None:
        """It has just been stored: the next `load` looks for it."""
        with self._lock:
            self._unknown.pop(revision, None)

    def _look_up(self, revision: str) -> tuple[ChatTokenizer | None, bool]:
        """What is known here, and whether that is an answer."""
        with self._lock:
            found = self._loaded.get(revision)
            if found is not None:
                self._loaded.move_to_end(revision)
                return found, True
            return None, time.monotonic() < self._unknown.get(revision, 0.0)

    def _load(self, database: Database, revision: str) -> ChatTokenizer | None:
        stored = database.read(lambda tx: read_tokenizer(tx, revision))
        found = None if stored is None else _load_stored(revision, stored)
        with self._lock:
            self._loading.pop(revision, None)
            if found is None:
                self._unknown[revision] = time.monotonic() + UNKNOWN_FOR
                self._unknown.move_to_end(revision)
                if len(self._unknown) > _MOST_UNKNOWN:
                    self._unknown.popitem(last=False)
                return None
            self._unknown.pop(revision, None)
            self._loaded[revision] = found
            while len(self._loaded) > self._most:
                self._loaded.popitem(last=False)
        return found


def _load_stored(revision: str, stored: bytes) -> ChatTokenizer | None:
    """None for one that this version of the library cannot use: then it is as good as unknown."""
    try:
        return load_canonical(zlib.decompress(stored))
    except (HordeError, zlib.error) as error:
        log.warning("tokenizer_unusable", revision=revision, error=str(error))
        return None


def _parse(body: bytes) -> Any:
    if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
        raise bad_request(f"The body holds more than {MOST_BRACKETS} arrays and objects.")
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise bad_request("The body is not UTF-8.") from None
    except RecursionError:
        raise bad_request(f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError:
        raise bad_request("The body is not valid JSON.") from None


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError


def _check_special_tokens(special: object) -> None:
    if not isinstance(special, dict) or len(special) > MOST_SPECIAL_TOKENS:
        _refuse("special_tokens", f"has to be an object of at most {MOST_SPECIAL_TOKENS} texts")
    for name, text in special.items():
        if not is_token_name(name):
            _refuse("special_tokens", "has to have names such as `bos_token`")
        if not isinstance(text, str) or len(text) > LONGEST_SPECIAL_TOKEN:
            _refuse(f"special_tokens.{name}", f"has to be a text of at most {LONGEST_SPECIAL_TOKEN} characters")


def _is_deeper(value: object, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ())
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _refuse(field: str, fault: str) -> NoReturn:
    raise bad_request(f"{field} {fault}.".replace("..", "."), field=field)
