"""Generates reference pages from what the code already states: variables, options and the command line.

`make reference` writes them to docs/reference, where they are committed; a test compares them. Everything comes from
the registry of variables (dtcomm/env.py), signatures, docstrings and argument parsers, and nothing is repeated by
hand. The text is the same with every version of Python. What is undocumented raises `Undocumented`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

# What users call, in the order of the page: title -> names. A module stands for its public functions and classes.
OPTION_SECTIONS: dict[str, tuple[str, ...]] = {
    "DDP": ("dtcomm.ddp.compress", "dtcomm.ddp.DDPState", "dtcomm.ddp.attach"),
    "FSDP and ZeRO": ("dtcomm.fsdp.compress", "dtcomm.fsdp.ShardedOptimizer"),
    "Tensor parallelism": ("dtcomm.tp",),
    "Local SGD": ("dtcomm.local_sgd",),
    "Context parallelism": ("dtcomm.context_parallel",),
    "Experts": ("dtcomm.moe",),
    "Pipeline stages": ("dtcomm.pipeline",),
    "Axes of a mesh": ("dtcomm.mesh",),
    "Guard and compressors": (
        "dtcomm.compress.guard.Guard",
        "dtcomm.compress.powersgd.PowerSGD",
        "dtcomm.compress.feedback.DGC",
    ),
    "Collectives": ("dtcomm",),
    "Extension: elastic training": ("dtcomm.extensions.elastic",),
    "Extension: calibration": ("dtcomm.extensions.calibrate",),
    "Extension: extras": ("dtcomm.extensions.extras",),
}
# The functions whose words are compared in one table.
INTEGRATIONS = (
    "dtcomm.ddp.compress",
    "dtcomm.fsdp.compress",
    "dtcomm.fsdp.ShardedOptimizer",
    "dtcomm.tp.compress",
    "dtcomm.local_sgd.LocalSGD",
)
_SECTION = re.compile(r"^(Args|Attributes|Options):\n((?:[ ]+.*\n?|\n)+)", re.MULTILINE)

_OPTIONS = """\
# Options

Every argument of what users call, with its type, default and meaning. An argument without a default is required. The
[API reference](api/index.md) has results, errors and examples.
"""
_ENVIRONMENT = """\
# Environment variables

The variables for ordinary runs. The [others](environment-debug.md) are for bug reports and builds.

dtcomm reads them when a communicator is made. A wrong value raises a ValueError that names the variable and the valid
values. If only some ranks have a wrong value, the others raise a DtcommError that quotes it. Variables with "Equal on
all ranks" are compared between ranks.
"""
_ENVIRONMENT_DEBUG = """\
# Environment variables for bug reports

Ordinary runs need none of these variables; [those for users](environment.md) have a page of their own. Set one when a
bug report asks for it, or when you build dtcomm.

dtcomm reads them when a communicator is made, except two. `DTCOMM_NATIVE_DIR` is read when dtcomm is imported, and
`DTCOMM_KERNEL` at the first use of dtcomm, such as `import dtcomm.ddp`.
"""
_COMMAND_LINE = """\
# Command line

`pip install ".[cli]"` in the checkout installs the command `dtcomm`; `python -m dtcomm` is the same. Every command
takes `--help`, and those that print figures take `--json`.
"""


class Undocumented(Exception):
    """A variable, an option or an argument of a command has no description."""


# --- environment ---------------------------------------------------------------------------------------------------


def environment() -> str:
    """The variables that users set."""
    from dtcomm import env

    rows = _variable_rows({name: variable for name, variable in env.VARIABLES.items() if variable.user})
    return "\n".join([_ENVIRONMENT, *rows, ""])


def environment_debug() -> str:
    """The other variables: those of run time, those of build time, and those of other programs that dtcomm reads."""
    from dtcomm import env

    rest = {name: variable for name, variable in env.VARIABLES.items() if not variable.user}
    running = {name: variable for name, variable in rest.items() if not variable.build}
    building = {name: variable for name, variable in rest.items() if variable.build}
    others = [f"| `{name}` | {_sentence(name, meaning)} |" for name, meaning in env.EXTERNAL.items()]
    parts = [_ENVIRONMENT_DEBUG, "## When dtcomm runs", "", *_variable_rows(running), ""]
    parts += ["## When dtcomm is built", "", *_variable_rows(building), ""]
    parts += ["## Variables of other programs that dtcomm reads", "", "| variable | meaning |", "|---|---|"]
    return "\n".join([*parts, *others, ""])


def _variable_rows(variables: Mapping[str, Any]) -> Iterator[str]:
    yield "| variable | default | meaning | values |"
    yield "|---|---|---|---|"
    for name, variable in variables.items():
        default = f"`{variable.default}`" if variable.default else ""
        values = ", ".join(f"`{choice}`" for choice in variable.choices)
        equal = " Equal on all ranks." if variable.shared else ""
        yield f"| `{name}` | {default} | {_sentence(name, variable.meaning)}{equal} | {values} |"


def _sentence(name: str, meaning: str) -> str:
    if not meaning.strip():
        raise Undocumented(f"dtcomm/env.py: {name} has no meaning")
    return f"{_cell(meaning).rstrip('.')}."


# --- options -------------------------------------------------------------------------------------------------------


def options() -> str:
    """A table of the words that integrations share, and a table of the options of everything that users call."""
    from dtcomm.codecs.spec import CODECS

    parts = [_OPTIONS, "## The same words in every integration", "", *_shared_words(), ""]
    for title, names in OPTION_SECTIONS.items():
        parts += [f"## {title}", ""]
        for name, value in public_callables(names):
            if rows := list(_option_rows(name, value)):
                parts += [f"### {name}", "", _summary(value), "", *rows, ""]
    parts += [
        "## Codecs",
        "",
        "Options after a colon, separated by commas: `int8:block=64,round=stochastic`.",
        "",
    ]
    families: dict[Any, list[str]] = {}
    for name, entry in CODECS.items():
        families.setdefault(entry.make, []).append(name)
    for make, codec_names in families.items():
        fields = CODECS[codec_names[0]].options()
        title = ", ".join(f"`{name}`" for name in codec_names)
        parts += [f"### {title}", "", _summary(make), ""]
        parts += [*_codec_rows(make, fields), ""] if fields else ["No options.", ""]
    return "\n".join(parts)


def public_callables(names: tuple[str, ...]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions and classes of dotted names, of which those of modules stand for their public ones."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            owner, _, attribute = name.rpartition(".")
            yield name, getattr(importlib.import_module(owner), attribute)
            continue
        public = getattr(module, "__all__", None) or [
            key for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == name
        ]  # fmt: skip
        for key in public:
            value = getattr(module, key)
            if inspect.isfunction(value) or (inspect.isclass(value) and _is_made_by_users(value)):
                yield f"{name}.{key}", value


def _is_made_by_users(cls: type) -> bool:
    """Whether the docstring of a class says how to make one; results, such as reports, have attributes alone."""
    return re.search(r"^Args:", inspect.getdoc(cls) or "", re.MULTILINE) is not None


def option_parameters(value: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that a caller passes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(value).parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    }


def _option_rows(name: str, value: Callable[..., Any]) -> Iterator[str]:
    parameters, meanings = option_parameters(value), documented(value)
    if not parameters:
        return
    yield "| argument | type | default | meaning |"
    yield "|---|---|---|---|"
    for key, parameter in parameters.items():
        if not meanings.get(key):
            raise Undocumented(f"{name}: argument {key!r} is not in the docstring")
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        cells = (f"`{stars}{key}`", _type(parameter.annotation), _default(parameter), _cell(meanings[key]))
        yield f"| {' | '.join(cells)} |"


def _codec_rows(make: Any, fields: Mapping[str, Any]) -> Iterator[str]:
    meanings = documented(make)
    yield "| option | default | valid | meaning |"
    yield "|---|---|---|---|"
    for key, field in fields.items():
        if not meanings.get(key):
            raise Undocumented(f"{make.__name__}: option {key!r} is not in the docstring")
        yield f"| `{key}` | `{_value(field.default)}` | {_cell(field.metadata['valid'])} | {_cell(meanings[key])} |"


def _shared_words() -> Iterator[str]:
    """The defaults of each word that at least two integrations have."""
    columns = {name: option_parameters(value) for name, value in public_callables(INTEGRATIONS)}
    words = {word: None for parameters in columns.values() for word in parameters}
    yield " | ".join(["| argument", *(f"`{name.removeprefix('dtcomm.')}`" for name in columns)]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for word in words:
        having = [parameters.get(word) for parameters in columns.values()]
        if sum(parameter is not None for parameter in having) > 1:
            cells = ["" if parameter is None else _default(parameter) or "required" for parameter in having]
            yield f"| `{word}` | {' | '.join(cells)} |"


def documented(value: Any) -> dict[str, str]:
    """The descriptions under ``Args:``, ``Attributes:`` and ``Options:`` of a docstring, by name.

    An attribute may have the name of an argument, which is then the one that is described.
    """
    meanings: dict[str, str] = {}
    sections = _SECTION.findall(inspect.getdoc(value) or "")
    for _, section in sorted(sections, key=lambda section: section[0] != "Attributes"):
        indent = len(section) - len(section.lstrip(" "))
        names: list[str] = []
        for line in section.splitlines():
            text = line[indent:]
            match = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:(.*)", text)
            if match and not text.startswith(" "):
                names = [name.strip().lstrip("*") for name in match[1].split(",")]
                meanings |= {name: match[2].strip() for name in names}
            else:
                for name in names:
                    meanings[name] = f"{meanings[name]} {text.strip()}".strip()
    return meanings


def _summary(value: Any) -> str:
    return _escape((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return f"`{re.sub(r'(?:[A-Za-z_]+[.])+', '', text)}`".replace("|", "\\|")


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return ""
    return f"`{_value(parameter.default)}`".replace("|", "\\|")


def _value(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        with contextlib.suppress(TypeError):
            if value == type(value)():
                return f"{type(value).__name__}()"
    return re.sub(r"<.*>", "...", value if isinstance(value, str) and not value.strip('"') else repr(value))


def _cell(text: str) -> str:
    return _escape(text).replace("|", "\\|")


def _escape(text: str) -> str:
    """Markdown of a docstring's text: what stands in backticks is code already."""
    parts = re.split(r"(``.+?``|`.+?`)", re.sub(r":\w+:`", "`", text))
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_<>\[\]])", r"\\\1", part) for part in parts
    )


# --- command line --------------------------------------------------------------------------------------------------


def command_line() -> str:
    """The list of commands, as the help prints it, and the arguments of each command in tables."""
    from dtcomm.cli.main import usage

    return "\n".join([_COMMAND_LINE, f"## dtcomm\n\n```text\n{usage()}\n```\n", *map(_command, parsers())])


def _command(parser: argparse.ArgumentParser) -> str:
    """The description, the arguments by group, and the epilog; argparse's own layout depends on Python's version."""
    formatter = parser._get_formatter()
    parts = [f"## {parser.prog}", ""]
    parts += [_preformatted(parser, parser.description), ""] if parser.description else []
    for number, group in enumerate(parser._action_groups):
        actions = [action for action in group._group_actions if "--help" not in action.option_strings]
        rows = []
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                rows += [f"| `{each.dest}` | {_cell(each.help or '')} |" for each in action._choices_actions]
                continue
            name = "/".join(action.option_strings) or action.dest
            if not action.help or action.help == argparse.SUPPRESS:
                raise Undocumented(f"{parser.prog}: {name} has no help")
            rows.append(f"| {_invocation(formatter, action)} | {_cell(formatter._expand_help(action))} |")
        if rows:
            title = ("Arguments", "Options")[number] if number < 2 else f"{group.title}".capitalize()
            parts += [f"**{title}**", "", "| argument | meaning |", "|---|---|", *rows, ""]
    parts += [_preformatted(parser, parser.epilog), ""] if parser.epilog else []
    return "\n".join(parts)


def _invocation(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """``-b``, ``--minbytes SIZE``: the flags of an argument and its value."""
    if not action.option_strings:
        default = formatter._get_default_metavar_for_positional(action)
        names = [formatter._format_args(action, default)]
    else:
        names = list(action.option_strings)
        if action.nargs != 0:
            default = formatter._get_default_metavar_for_optional(action)
            names[-1] += f" {formatter._format_args(action, default)}"
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _preformatted(parser: argparse.ArgumentParser, text: str | None) -> str:
    """Text of a parser: as it is where its formatter keeps lines, else as a paragraph."""
    text = (text or "").strip().replace("%(prog)s", parser.prog).replace("%%", "%")
    if issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter) and "\n" in text:
        return f"```text\n{text}\n```"
    return _escape(" ".join(text.split()))


def parsers() -> list[argparse.ArgumentParser]:
    """The argument parsers of all commands and of their subcommands."""
    from dtcomm.cli.main import COMMANDS

    made: list[argparse.ArgumentParser] = []
    make = argparse.ArgumentParser.__init__

    def record(self: argparse.ArgumentParser, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    with mock.patch.object(argparse.ArgumentParser, "__init__", record):
        for name, (module, _) in COMMANDS.items():
            command = importlib.import_module(module)
            before = len(made)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                command.main(["--help"])
            if len(made) == before:
                raise Undocumented(f"dtcomm {name}: the command made no argparse.ArgumentParser")
    return made


# --- files ---------------------------------------------------------------------------------------------------------

FOLDER = Path(__file__).parent / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "options.md": options,
    "environment.md": environment,
    "environment-debug.md": environment_debug,
    "command-line.md": command_line,
}


def text_of(name: str) -> str:
    """The whole text of a page in ``FOLDER``."""
    comment = "<!-- Generated by `make reference` from the code; change the code, not this page. -->"
    return f"{comment}\n\n{PAGES[name]().rstrip()}\n"


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / page).write_text(text_of(page), encoding="utf-8")
