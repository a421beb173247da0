"""Messages to token ids by the model's own chat template, for a broker that does not know the model's tokenizer."""

from __future__ import annotations

from typing import Any

from worker.engine.interface import RequestRefusedError


def render(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """The ids of a conversation with the beginning of the answer.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.
        messages: `role` and `content` each.

    Raises:
        RequestRefusedError: there is no template, or it does not take these messages; the message holds none of them.
    """
    if not tokenizer.chat_template:
        raise RequestRefusedError("invalid_request", "this model has no chat template")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template has put the special tokens where they belong.
        return tuple(int(i) for i in tokenizer(text, add_special_tokens=False).input_ids)
    except Exception as error:
        # Whatever it is: a template is a program that somebody wrote, and what it says may quote the conversation.
        raise RequestRefusedError(
            "invalid_request", f"the model's chat template does not take these messages ({type(error).__name__})"
        ) from error
