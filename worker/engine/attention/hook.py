"""Puts our attention into a transformers model: the model computes queries, keys and values, a backend does the rest.

    install(model)
    with attending(backend):
        model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)

An installed model attends only inside `attending`; outside it raises, since without a cache it would forget the tokens
of earlier steps and mix those of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

# No mask function is registered under this name: transformers then makes no mask, which saves its time.
_NAME = "horde_paged"


class Attends(Protocol):
    """The one method of an `AttentionBackend` that a forward pass needs."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""


class AttentionOutsideStepError(RuntimeError):
    """An installed model was called outside `attending`."""


class ForeignAttentionError(Exception):
    """The model wants something of its attention that we don't do; the message goes on after "the model"."""


_current: ContextVar[Attends | None] = ContextVar("_current", default=None)


@contextmanager
def attending(backend: Attends) -> Iterator[None]:
    """Within it, installed models of this thread attend with `backend`."""
    token = _current.set(backend)
    try:
        yield
    finally:
        _current.reset(token)


def install(model: Any) -> None:
    """Let a `PreTrainedModel` attend through us; `model.set_attn_implementation` makes it stop.

    Raises:
        ForeignAttentionError: it can't.
    """
    AttentionInterface.register(_NAME, attention)
    model.set_attn_implementation(_NAME)
    if model.config._attn_implementation != _NAME:  # noqa: SLF001 (transformers has no other name for it)
        raise ForeignAttentionError("computes its attention by itself, past transformers' attention interface")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: [1, heads, T, size] in, [1, T, heads, value size] out.

    A layer's own attributes are not read, except for its number: some carry a window that the layer does not use.

    Raises:
        AttentionOutsideStepError: no backend is set.
        ForeignAttentionError: this can't be done right.
    """
    backend = _current.get()
    if backend is None:
        raise AttentionOutsideStepError(
            "this model belongs to a paged engine and was called outside of its steps; load it again for other uses"
        )
    if attention_mask is not None:
        raise ForeignAttentionError("masks tokens in a way of its own")
    if others.get("position_bias") is not None:
        raise ForeignAttentionError("adds a bias of its own to the scores")
    if others.get("is_causal") is False:
        raise ForeignAttentionError("looks at later tokens")
    result = backend.attend(
        module.layer_idx,  # type: ignore[arg-type]  # a module's attributes are typed as modules
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return result[None], None
