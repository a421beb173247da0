"""Chat templates: Jinja in a sandbox, so that messages become the text that a model was trained to read.

A template is a program of whoever published it, run on what any client sends. It sees plain data only, cannot change it,
and is stopped when it has taken too long or made too much. What it does beside that, it does as the tokenizer of a model
does (`apply_chat_template`), character for character.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from horde.registry.template_guards import Budget, ExhaustedError, budget_of_this, made
from horde.registry.template_sandbox import RefusedError, environment

LONGEST_TEMPLATE = 64 << 10
# Of this thread's own time: a busy machine makes no template slow.
MOST_SECONDS = 2.0
LONGEST_MESSAGE = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
_TOKEN_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}_token")


class TemplateError(ValueError):
    """A template cannot be compiled, or does not take these messages; the message is for whoever sent them."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ChatTemplate:
    """A compiled template; any thread may render with it.

    Args:
        source: Jinja, as models carry it.
        special_tokens: what the template may name, such as `bos_token`, and its text.

    Raises:
        TemplateError: it does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise TemplateError(f"the chat template is longer than {LONGEST_TEMPLATE} characters")
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: {_short(error.message or '')}") from None
        except Exception as error:  # noqa: BLE001 a constant in it may raise anything
            raise TemplateError(f"the chat template does not compile ({type(error).__name__})") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text for `messages`, each a dict of `role`, `content` and maybe more.

        Raises:
            TemplateError: the template refuses them, fails at them, or takes too long or too much for them.
        """
        budget = Budget(time.thread_time() + MOST_SECONDS)
        # A key without a value is no key to most templates.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        said = budget_of_this.set(budget)
        try:
            made(given)
            pieces = []
            for piece in self._template.generate(
                **self._special_tokens,
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                pieces.append(piece)
                budget.let_out(len(piece))
            return "".join(pieces)
        except RefusedError as error:
            raise TemplateError(_short(str(error)) or "the chat template refuses these messages") from None
        except (ExhaustedError, SecurityError) as error:
            raise TemplateError(f"the chat template was stopped: {_short(str(error))}") from None
        except Exception as error:  # noqa: BLE001 its text may quote a message, or the template
            raise TemplateError(f"the chat template fails at these messages ({type(error).__name__})") from None
        finally:
            budget_of_this.reset(said)


def is_token_name(name: str) -> bool:
    """Whether a special token may go by this name in a template: `bos_token` and its like, which hide nothing else."""
    return _TOKEN_NAME.fullmatch(name) is not None


def _short(message: str) -> str:
    return _CONTROL.sub(" ", message).strip()[:LONGEST_MESSAGE]
