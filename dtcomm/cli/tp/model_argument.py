"""The argument MODEL of the commands of ``dtcomm tp``: ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def call_function(text: str) -> Any:
    """Return what the function of ``package.module:function`` returns; modules of the current folder are found too.

    Raises:
        ValueError: There is no such module or function.
    """
    module, _, function = text.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"MODEL: {text}: {error}") from None
    return make()
