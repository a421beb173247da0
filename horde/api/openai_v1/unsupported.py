"""What other servers take and this one cannot honour: refused by name where it would change the answer.

A field that nobody here knows and that is not in these tables is ignored (`store`, `metadata`, `user`, `service_tier`,
`parallel_tool_calls`), since it changes where an answer is kept or who is billed, not what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horde.errors import ErrorCode, HordeError

# Field -> the values that ask for nothing. Null always does.
_OF_OPENAI: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": ([], ["text"]),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
}
# What vLLM, llama.cpp and their like add, and clients written for them send.
_OF_OTHERS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "prompt_embeds": ([],),
    "prompt_logprobs": (),
    "reasoning": (),
    "repeat_penalty": (1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "tfs": (1,),
    "top_a": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
HARMLESS: Mapping[str, tuple[Any, ...]] = _OF_OPENAI | _OF_OTHERS


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raise HordeError 400 `unsupported_parameter` for the first of these fields that would change the answer.

    Args:
        given: the fields of a body that its model does not have.
    """
    for name, value in given.items():
        harmless = HARMLESS.get(name)
        if harmless is None or value is None or any(_same(value, other) for other in harmless):
            continue
        raise HordeError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            f"`{name}` is not supported on this horde with this value. Leave it out.",
            rc="BadRequest",
            errors={name: "not supported"},
        )


def _same(value: Any, other: Any) -> bool:
    """Equal, where `true` is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
