"""What is compiled, and what stays outside of compiled graphs."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch.nn.attention.flex_attention import flex_attention

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# One compiled function for all layers: the second layer finds the kernel of the first. `fullgraph`, because
# past the recompile limit torch would run FlexAttention uncompiled without a word, S × S scores and all.
compiled_flex_attention = torch.compile(flex_attention, fullgraph=True)


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run as plain Python even when the caller is compiled: its graph ends here, a new one starts after."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[Arguments, Result], disabled)
