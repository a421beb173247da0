"""A model whose weights are what quantised ones stand for, to compare with."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from worker.models.quantise import Int8Linear


def restored(model: Any) -> Any:
    """A copy in fp32, with plain layers in the place of those in int8."""
    copied = copy.deepcopy(model).float()
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Int8Linear):
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain.weight.data = child.weight.float() * child.scale.float()[:, None]
                if child.bias is not None:
                    plain.bias.data = child.bias.float()
                setattr(parent, name, plain)
    return copied
