"""Checks of arguments, and suggestions for their error messages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def suggest(given: object, valid: Iterable[str], in_context: Callable[[str], str] = str) -> str:
    """Return `` (did you mean 'int8'?)`` with the valid name that is most like ``given``; empty if none is.

    Args:
        given: What was given.
        valid: The valid names.
        in_context: Turns the name into what the caller should write.
    """
    names, wanted = list(valid), str(given)
    # A beginning counts more than likeness: "fp8" means "fp8_e4m3", not "mxfp8".
    near = [name for name in names if wanted and name.startswith(wanted.lower())]
    near = near or _most_like(wanted, names) or _most_like(wanted.lower(), names)
    return f" (did you mean {in_context(near[0])!r}?)" if near else ""


def _most_like(wanted: str, names: list[str]) -> list[str]:
    """Return the first of the names that are most like ``wanted``, in a list that is empty if none is like it."""
    ratios = {
        name: difflib.SequenceMatcher(a=name, b=wanted).ratio()
        for name in difflib.get_close_matches(wanted, names, n=max(1, len(names)))
    }
    return sorted(ratios, key=lambda name: (-ratios[name], names.index(name)))[:1]


def require_int(name: str, value: object, least: int | None = None) -> None:
    """Require an integer, of at least ``least``.

    Args:
        name: The argument, for the error.
        value: What was given.
        least: The smallest valid value; None: any.

    Raises:
        TypeError: ``value`` is no integer.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: expected {least} or more")
