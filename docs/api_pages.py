"""The pages of the API, from docstrings and signatures, and what the other reference pages need to read them.

`API` lists what is public; tests of docstrings and of the number of public names read it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# What is public: page of the API -> (title, names). A module stands for its public functions and classes.
API: dict[str, tuple[str, tuple[str, ...]]] = {
    "collectives": ("Collectives", ("dtcomm",)),
    "ddp": ("DDP", ("dtcomm.ddp",)),
    "fsdp": ("FSDP and ZeRO", ("dtcomm.fsdp",)),
    "frameworks": ("Training frameworks", ("dtcomm.frameworks",)),
    "tp": ("Tensor parallelism", ("dtcomm.tp",)),
    "local-sgd": ("Local SGD", ("dtcomm.local_sgd",)),
    "context-parallel": ("Context parallelism", ("dtcomm.context_parallel",)),
    "moe": ("Experts", ("dtcomm.moe",)),
    "pipeline": ("Pipeline parallelism", ("dtcomm.pipeline",)),
    "mesh": ("Axes of a mesh", ("dtcomm.mesh",)),
    "compressors": (
        "Compressors",
        (
            "dtcomm.compress.policy.Policy",
            "dtcomm.compress.policy.Rule",
            "dtcomm.compress.powersgd.PowerSGD",
            "dtcomm.compress.feedback.Feedback",
            "dtcomm.compress.feedback.DGC",
            "dtcomm.compress.guard.Guard",
            "dtcomm.compress.report.Report",
            "dtcomm.compress.checkpoint.restore",
        ),
    ),
    "codecs": ("Codecs", ("dtcomm.codecs",)),
    "backend": ("Backend", ("dtcomm.backend",)),
    "profiling": ("Profiling", ("dtcomm.profiling",)),
    "errors": ("Errors", ("dtcomm.errors",)),
    "schedule": ("Schedules", ("dtcomm.schedule",)),
    "algorithms": ("Algorithms", ("dtcomm.algorithms",)),
    "kernels": (
        "Kernels",
        (
            "dtcomm.kernels",
            "dtcomm.kernels.ops.encode",
            "dtcomm.kernels.ops.decode",
            "dtcomm.kernels.ops.reduce",
            "dtcomm.kernels.ops.reduce_encode",
            "dtcomm.kernels.ops.quantize",
            "dtcomm.kernels.epilogue",
        ),
    ),
    "launch": ("Launching ranks", ("dtcomm.launch",)),
    "jobs": ("Extension: whole jobs", ("dtcomm.extensions.jobs",)),
    "elastic": ("Extension: elastic training", ("dtcomm.extensions.elastic",)),
    "calibrate": ("Extension: calibration of tensor parallelism", ("dtcomm.extensions.calibrate",)),
    "extras": ("Extension: extras", ("dtcomm.extensions.extras",)),
    "weights": ("Extension: weights for inference engines", ("dtcomm.extensions.weights",)),
}
_SECTION = re.compile(
    r"^(Args|Attributes|Options|Modules|Returns|Yields|Raises|Examples?):(:?)\n((?: +.*\n?|\n(?= ))+)",
    re.MULTILINE,
)

_API = """\
# API

The names in this section are public. Modules and names that start with an underscore, and modules that have no page
here, are internal and may change. Options that several functions share are on a [page of their own](../options.md).
"""


class Undocumented(Exception):
    """A variable, an option or an argument of a command has no description."""


def public_callables(names: Iterable[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and classes of dotted names, of which those of modules stand for their public ones."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            owner, _, attribute = name.rpartition(".")
            yield name, getattr(importlib.import_module(owner), attribute)
            continue
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
        for key in sorted(getattr(module, "__all__", own), key=lambda key: key != "compress"):
            if not key.startswith("_") and callable(value := getattr(module, key)):
                yield f"{name}.{key}", value


def public() -> dict[str, Callable[..., Any]]:
    """Everything that the API pages document, by its full name."""
    return dict(public_callables(name for _, names in API.values() for name in names))


def option_parameters(value: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a caller passes, by name; none for classes that users do not make, such as reports."""
    if inspect.isclass(value) and not re.search(r"^Args:", inspect.getdoc(value) or "", re.MULTILINE):
        return {}
    return {
        name: parameter
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    }


def shared_options(value: Callable[..., Any]) -> Any:
    """The ``TypedDict`` of the options that a function or class shares with others (`shares_options`), or None."""
    function: Any = inspect.unwrap(vars(value).get("__init__", value) if inspect.isclass(value) else value)
    for hint in getattr(function, "__annotations__", {}).values():
        if match := re.search(r"Unpack\[(?:\w+\.)*(\w+)\]", str(hint)):
            return function.__globals__.get(match[1])
    return None


def shared_arguments(value: Callable[..., Any]) -> list[str]:
    """The arguments of a function that have the text of its shared options."""
    texts, own = documented(shared_options(value)), documented(value)
    return [name for name in option_parameters(value) if name in texts and own.get(name) == texts[name]]


def address(name: str) -> str:
    """The address of a public name, from docs/reference."""
    page = next(page for page, (_, names) in API.items() if name in dict(public_callables(names)))
    return f"api/{page}.md#{anchor(name)}"


def anchor(heading: str) -> str:
    """The anchor that GitHub and MyST give to a heading that is a name."""
    return heading.replace(".", "").lower()


def argument_meanings(name: str, value: Callable[..., Any]) -> dict[str, str]:
    """The descriptions of the arguments of a function or class; `Undocumented` if one has none."""
    meanings = documented(value)
    for key in option_parameters(value):
        if not meanings.get(key):
            raise Undocumented(f"{name}: argument {key!r} is not in the docstring")
    return meanings


# --- docstrings ---------------------------------------------------------------------------------------------------


def documented(value: Any) -> dict[str, str]:
    """The descriptions under ``Args:``, ``Attributes:`` and ``Options:`` of a docstring, by name.

    An attribute may have the name of an argument, which is then the one that is described.
    """
    sections = [
        (title, entries)
        for title, _, entries in _SECTION.findall(f"{inspect.getdoc(value) or ''}\n")
        if title in ("Args", "Attributes", "Options")
    ]
    sections.sort(key=lambda section: section[0] != "Attributes")
    return {name: text for _, entries in sections for names, text in _entries(entries) for name in names}


def _entries(section: str) -> Iterator[tuple[list[str], str]]:
    """The names and the text of each entry of a section: ``a, b: text``."""
    starts = re.split(r"^(?=\S)", textwrap.dedent(section), flags=re.MULTILINE)
    for entry in filter(None, starts):
        match = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(.*)", entry, re.DOTALL)
        if match:
            yield [name.strip().lstrip("*") for name in match[1].split(",")], " ".join(match[2].split())


def summary(value: Any) -> str:
    return escape((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def type_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?:\w+[.])+", "", text)


def code_text(text: str) -> str:
    """Text as code in a cell of a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def default_text(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else code_text(value_text(parameter.default))


def value_text(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        with contextlib.suppress(TypeError):
            if value == type(value)():
                return f"{type(value).__name__}()"
    return re.sub(r"<.*>", "...", value if isinstance(value, str) and not value.strip('"') else repr(value))


def cell(text: str) -> str:
    return escape(text).replace("|", "\\|")


def escape(text: str) -> str:
    """Markdown of a docstring's text: what stands in backticks is code already."""
    parts = re.split(r"(``.+?``|`.+?`)", re.sub(r":\w+:`", "`", text), flags=re.DOTALL)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]$])", r"\\\1", part) for part in parts
    )


# --- pages --------------------------------------------------------------------------------------------------------


def api_index() -> str:
    """The list of the API's pages, each with the first sentence of its module."""
    rows = []
    for page, (title, names) in API.items():
        line = f"- [{title}]({page}.md)"
        if len(names) == 1 or page in ("collectives", "kernels"):
            line += f": `{names[0]}`. {summary(importlib.import_module(names[0]))}"
        rows.append(line)
    return "\n".join([_API, *rows, "", "```{toctree}", ":hidden:", "", *API, "```"])


def api_page(page: str) -> str:
    """One page of the API: the docstrings of a module and of its public functions, classes and methods."""
    title, names = API[page]
    parts = [f"# {title}", ""]
    explained: dict[tuple[str, str], str] = {}
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            parts += [
                f"Module `{name}`.",
                "",
                _markdown(inspect.getdoc(importlib.import_module(name)) or ""),
                "",
            ]
        for full_name, value in public_callables((name,)):
            parts += [f"## {full_name}", "", _described(full_name, value, explained), ""]
            if inspect.isclass(value):
                parts += _methods(value, explained)
    return "\n".join(parts)


def _described(name: str, value: Any, explained: dict[tuple[str, str], str]) -> str:
    """The signature and the docstring of a function, class or property."""
    parameters = [] if isinstance(value, property) else list(option_parameters(value).values())
    arguments = bool(parameters)
    if dataclasses.is_dataclass(value) and not parameters:  # explained under Attributes or Options
        parameters = list(inspect.signature(value).parameters.values())
    parts = []
    if parameters or not (inspect.isclass(value) or isinstance(value, property)):
        parts.append(f"```py\n{_signature(name.rpartition('.')[2], value, parameters)}\n```")
    text, position = f"{inspect.getdoc(value) or ''}\n", 0
    for match in _SECTION.finditer(text):
        parts.append(_markdown(text[position : match.start()]))
        if match[1] == "Args" and arguments:
            parts.append("\n".join(["**Arguments**", "", *_arguments(name, value, explained)]))
        else:
            parts.append(_section(match[1], textwrap.dedent(match[3]).strip(), code=bool(match[2])))
        position = match.end()
    return "\n\n".join(filter(None, [*parts, _markdown(text[position:])]))


def _arguments(name: str, value: Any, explained: dict[tuple[str, str], str]) -> Iterator[str]:
    """The meaning of each argument; `explained` has those that the page has explained before, and where."""
    meanings, shared = argument_meanings(name, value), shared_arguments(value)
    elsewhere: dict[str, list[str]] = {}
    for key in option_parameters(value):
        before = explained.setdefault((key, meanings[key]), name)
        if key in shared:
            first = next(
                key for key, other in public().items() if shared_options(other) is shared_options(value)
            )
            link = f"see [options](../options.md#options-of-{anchor(first)})"
        elif before != name:
            link = f"as for [`{before}`](#{anchor(before)})"
        else:
            yield f"- `{key}`: {escape(meanings[key])}"
            continue
        elsewhere.setdefault(link, []).append(f"`{key}`")
    yield from (f"- {', '.join(keys)}: {link}." for link, keys in elsewhere.items())


def _signature(name: str, value: Any, parameters: list[inspect.Parameter]) -> str:
    """The call of a function: each argument with its type and default, on lines of their own if there are many."""
    words: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        hint = f": {type_text(parameter.annotation)}" if type_text(parameter.annotation) else ""
        default = (
            ""
            if parameter.default is parameter.empty
            else f" = {value_text(parameter.default) or repr(parameter.default)}"
        )
        words.append(f"{stars}{parameter.name}{hint}{default}")
    result = "" if inspect.isclass(value) else type_text(inspect.signature(value).return_annotation)
    arrow = f" -> {result}" if result else ""
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){arrow}"])


def _section(title: str, text: str, *, code: bool) -> str:
    """A section of a docstring other than its arguments; the options of codecs are on the page of options."""
    if code:
        text = f"```py\n{text}\n```"
    elif title == "Options":
        text = "See [codecs](../options.md#codecs)."
    elif title in ("Args", "Attributes", "Modules", "Raises"):
        rows = (f"- {', '.join(f'`{key}`' for key in keys)}: {escape(text)}" for keys, text in _entries(text))
        text = "\n".join(rows)
    else:
        text = _markdown(text)
    return f"**{title}**\n\n{text}"


def _methods(cls: type, explained: dict[tuple[str, str], str]) -> Iterator[str]:
    """The public methods and properties of a class; those of internal base classes in one line each."""
    documented_classes = set(map(id, public().values()))
    seen: set[str] = set()
    rows = []
    for base in cls.__mro__:
        own = base is cls
        if not base.__module__.startswith("dtcomm") or (not own and id(base) in documented_classes):
            continue
        for key, member in vars(base).items():
            value = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
            if (
                key.startswith("_")
                or key in seen
                or not (inspect.isfunction(value) or isinstance(value, property))
            ):
                continue
            seen.add(key)
            if own:
                name = f"{cls.__name__}.{key}"
                yield f"### {name}\n\n{_described(name, value, explained)}\n"
            else:
                rows.append(f"- `{key}`: {summary(value)}")
    if rows:
        yield f"### Other methods of {cls.__name__}\n"
        yield from [*rows, ""]


def _markdown(text: str) -> str:
    """Markdown of the text of a docstring: an indented paragraph or one that begins with ``>>>`` is code."""
    parts: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith(">>>"):
            parts.append(f"```pycon\n{paragraph.rstrip()}\n```")
        elif paragraph.startswith("    "):
            body = textwrap.dedent(paragraph).rstrip()
            if parts and parts[-1].startswith("```py\n"):  # the same block, after an empty line
                parts[-1] = f"{parts[-1][:-4]}\n\n{body}\n```"
            else:
                parts.append(f"```py\n{body}\n```")
        elif paragraph.strip():
            parts.append(escape(re.sub(r"::$", ":", paragraph.strip())))
    return "\n\n".join(parts)
