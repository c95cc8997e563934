"""Checks of arguments, suggestions for their error messages, and options that several functions share.

Functions that take the same many options take them as one value. Its keywords, types and texts stand once, in a
``TypedDict``, and its defaults in a value of that type::

    class Options(TypedDict, total=False):
        \"\"\"The options of the integration.

        Attributes:
            seed: The seed of stochastic rounding. Default 0.
        \"\"\"

        seed: int

    DEFAULTS: Options = {"seed": 0}

    @shares_options(DEFAULTS, Options)
    def compress(model: Module, **options: Unpack[Options]) -> State:
        options = complete_options("compress", options, DEFAULTS)  # passed on as one value
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])
TargetT = TypeVar("TargetT", bound=Callable[..., Any])
_arguments: dict[int, list[str]] = {}  # id of the defaults → what all functions that share them take besides


def suggest(given: object, valid: Iterable[str], in_context: Callable[[str], str] = str) -> str:
    """Return `` (did you mean 'int8'?)`` with the valid name that is most like ``given``; empty if none is.

    ``in_context`` turns the name into what the caller should write.
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
    """Require an integer (TypeError), of at least ``least`` (ValueError); None: any. Errors call it ``name``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}={value}: expected {least} or more")


def require_factor(value: float) -> None:
    """Require that a factor is finite and above 0; ValueError calls it ``factor``."""
    if not 0 < value < math.inf:
        raise ValueError(f"factor: expected a finite number above 0, got {value!r}")


@contextlib.contextmanager
def errors_name(argument: str) -> Iterator[None]:
    """Let errors about a codec name the argument that has it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = re.sub(rf"^({argument}|codec): ", "", str(error))
        raise type(error)(f"{argument}: {text}") from None


def require_bool(name: str, value: object) -> None:
    """Require True or False; TypeError names the argument."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def complete_options(function: str, given: Mapping[str, object], defaults: OptionsT) -> OptionsT:
    """Return the options of a call, those that were not given with their defaults; TypeError if one is unknown."""
    for name in given:
        if name not in defaults:
            valid = [*_arguments.get(id(defaults), ()), *defaults]
            raise TypeError(
                f"{function}: unknown option {name!r}{suggest(name, valid)}; valid: {', '.join(valid)}"
            )
    return cast("OptionsT", {**defaults, **given})


def shares_options(defaults: Mapping[str, object], options: type) -> Callable[[TargetT], TargetT]:
    """Show shared options in the signature and in the docstring of a function or class that takes ``**options``.

    The docstring of the ``TypedDict`` ``options`` explains them under ``Attributes:``. It may explain other arguments
    of the functions too, which are added to those docstrings that do not explain them, in the order of the signature.
    """
    texts = _split_entries(_entries(options, "Attributes"))

    def complete(target: TargetT) -> TargetT:
        function: Any = vars(target)["__init__"] if isinstance(target, type) else target
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        others = [parameter.name for parameter in named if parameter.name != "self"]
        common = _arguments.get(id(defaults), others)
        _arguments[id(defaults)] = [name for name in common if name in others]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in options.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *keywords])
        if own := _entries(target, "Args"):
            explained = {**texts, **_split_entries(own)}
            parameters = function.__signature__.parameters
            ordered = "".join(explained[name] for name in parameters if name in explained)
            target.__doc__ = _text(target).replace(own, ordered, 1)
        return target

    return complete


def _entries(value: object, title: str) -> str:
    """Return the entries of a section of a docstring; empty under ``python -OO``."""
    match = re.search(rf"^{title}:\n((?: +.*\n|\n(?= ))+)", _text(value), re.MULTILINE)
    return match[1] if match else ""


def _text(value: object) -> str:
    return f"{inspect.getdoc(value) or ''}\n"


def _split_entries(section: str) -> dict[str, str]:
    """Return name → text of the entries of a section."""
    starts = re.split(r"^(?= {4}\w)", section, flags=re.MULTILINE)
    return {text.partition(":")[0].strip(): text for text in starts if text}
