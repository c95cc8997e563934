"""A typed way to call `torch.autograd.Function`s, for the integrations that define some."""

from __future__ import annotations

from typing import Any

import torch


def autograd_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, which torch leaves without a type."""
    return function.apply(*args)  # type: ignore[no-untyped-call]
