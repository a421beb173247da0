"""The tokenizer of a model with its chat template, as the model's own library runs it: messages to text, text to token
ids, and whether token ids are what a text is made of.

Any thread may use one. What takes long runs outside Python's lock, so that other threads go on meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from horde.errors import HordeError, bad_request
from horde.registry.templates import ChatTemplate, TemplateError
from horde.registry.token_text import CONTEXT_TOKENS, accounts_for

_CHARACTERS_PER_TOKEN = 4
_MOST_REMEMBERED = 65_536
_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


class TokenizerError(ValueError):
    """This is no tokenizer that can be used; the message says why."""


class ChatTokenizer:
    """One tokenizer.

    Args:
        content: `tokenizer.json`.
        template: of its chats, where it has one.

    Attributes:
        vocabulary: token ids are below it.

    Raises:
        TokenizerError: the content is no tokenizer.
    """

    def __init__(self, content: bytes, template: ChatTemplate | None) -> None:
        with _failing_as_error():
            self._tokenizer = Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
            self._added = self._tokenizer.get_added_tokens_decoder()
            decoder = json.loads(self._tokenizer.decoder.__getstate__()) if self._tokenizer.decoder else {}
            # Loading looks at no text; a tokenizer that can read none is none.
            self._encode("a", special=True)
        self._silent = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._template = template
        self._byte_of = _byte_reader(decoder)
        self._shown: dict[int, tuple[str, bytes]] = {}

    @property
    def has_template(self) -> bool:
        """Whether it knows what a chat looks like."""
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that a model reads before it answers `messages`.

        Raises:
            TemplateError: the template refuses them, or there is none.
        """
        if self._template is None:
            raise TemplateError("the model has no chat template")
        return self._template.render(messages)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The token ids of a text.

        Args:
            special: whether to add what the tokenizer puts around a text by itself; a rendered chat has it already.

        Raises:
            HordeError: 400, there are characters that the tokenizer has no token for.
        """
        try:
            with _failing_as_error():
                return self._encode(text, special=special)
        except TokenizerError:
            raise bad_request("The tokenizer of this model cannot read this text.") from None

    def count(self, text: str) -> int:
        """How many tokens a text has; a quarter of its characters where the tokenizer cannot read it."""
        try:
            return len(self.encode(text, special=False))
        except HordeError:
            return len(text) // _CHARACTERS_PER_TOKEN

    def token(self, token_id: int) -> tuple[str, bytes]:
        """A token as it stands in a text, with its bytes, which need not be whole characters; ("", b"") for no token."""
        found = self._shown.get(token_id)
        if found is None:
            found = self._look_at(token_id)
            if len(self._shown) < _MOST_REMEMBERED:
                self._shown[token_id] = found
        return found

    def accounts_for(
        self, ids: Sequence[int], text: str, *, prompt_ids: Sequence[int] | None = None, stop: Sequence[str] = ()
    ) -> bool:
        """Whether `text` is what a worker shows that produced `ids` after the prompt.

        Where one of `stop` ends the text, the last token is what completed it; at most the last character is cut off. Each
        token has to have a share in the text: one that shows nothing, such as a control token, is no output.
        """
        if not all(0 <= token_id < self.vocabulary and token_id not in self._silent for token_id in ids):
            return False
        if not ids:
            return text == ""
        before = [token_id for token_id in (prompt_ids or ())[-CONTEXT_TOKENS:] if 0 <= token_id < self.vocabulary]
        try:
            with _failing_as_error():
                return accounts_for(self.decode, ids, text, before=before, stop=stop)
        except TokenizerError:
            return False

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without control tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # A batch of one: `encode` itself would hold Python's lock all along.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return list(encoding.ids)

    def _look_at(self, token_id: int) -> tuple[str, bytes]:
        spelled = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocabulary else None
        if spelled is None:
            return "", b""
        if token_id in self._added:
            return spelled, spelled.encode()
        raw = self._byte_of(spelled)
        if raw is not None:
            return raw.decode("utf-8", "replace"), raw
        # A token at the beginning of a text may lose its space, so it is looked at behind another one: itself.
        once, twice = (self._tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else once
        return text, text.encode()


def _byte_reader(decoder: Mapping[str, Any]) -> Callable[[str], bytes | None]:
    """What makes bytes of a token's spelling in the vocabulary; None for one that does not spell bytes."""
    kinds = {part.get("type") for part in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        bytes_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
        return lambda spelled: (
            bytes(bytes_of[letter] for letter in spelled) if all(letter in bytes_of for letter in spelled) else None
        )
    if "ByteFallback" in kinds:
        return lambda spelled: bytes.fromhex(spelled[3:5]) if _FALLBACK.fullmatch(spelled) else None
    return lambda _: None


def _byte_letters() -> str:
    """The letter that each byte has in a byte-level vocabulary: its own where it can be seen, else the next one from U+0100."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return "".join(chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256))


@contextlib.contextmanager
def _failing_as_error() -> Iterator[None]:
    """Make one kind of error of all that the library raises."""
    try:
        yield
    except BaseException as error:
        # A panic of the library is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(str(error)[:200]) from None
