"""Generates reference pages from what the code already states: the API, options, variables and the command line.

`make reference` writes them to docs/reference, where they are committed; a test compares them. Everything comes from
the registry of variables (dtcomm/env.py), signatures, docstrings and argument parsers, and nothing is repeated by
hand. The text is the same with every version of Python. What is undocumented raises `Undocumented`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from api_pages import (
    API,
    Undocumented,
    address,
    api_index,
    api_page,
    argument_meanings,
    cell,
    code_text,
    default_text,
    documented,
    escape,
    option_parameters,
    public,
    shared_arguments,
    shared_options,
    summary,
    type_text,
    value_text,
)

# The functions whose words are compared in one table.
INTEGRATIONS = (
    "dtcomm.ddp.compress",
    "dtcomm.fsdp.compress",
    "dtcomm.fsdp.ShardedOptimizer",
    "dtcomm.tp.compress",
    "dtcomm.local_sgd.LocalSGD",
    "dtcomm.pipeline.compress",
    "dtcomm.context_parallel.attention",
    "dtcomm.moe.dispatch",
)
# Word → why the integrations of the table that do not take it have no use for it.
WHY_NOT = {
    "exclude": "A message between pipeline stages, of attention or of experts is a whole activation. It has no parts "
    "with names; the calls that should stay uncompressed take the codec `none`.",
    "feedback": "Activations of tensor parallelism, attention and experts belong to other tokens in every step, so a "
    "residual of one step has no place in the next. Pipelines keep residuals of gradients.",
    "guard": "A guard compares averages of gradients with uncompressed ones. Activations are not averaged over steps "
    "or ranks, so there is nothing to compare; a codec that loses too much is refused instead (`allow_inaccurate`).",
    "seed": "Sums of activations and rows of experts take the number of the call as their seed.",
}
_OPTIONS = """\
# Options

The options that several functions share, and the options of codecs. The other arguments are in the
[API reference](api/index.md), with results, errors and examples.
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
    return f"{cell(meaning).rstrip('.')}."


# --- options -------------------------------------------------------------------------------------------------------


def options() -> str:
    """A table of the words that integrations share, the options that functions share, and those of codecs."""
    from dtcomm.codecs.spec import CODECS

    parts = [_OPTIONS, "## The same words in every integration", "", *_shared_words(), ""]
    sharing: dict[Any, list[str]] = {}
    for name, value in public().items():
        if shared_options(value) is not None:
            sharing.setdefault(shared_options(value), []).append(name)
    for first, *others in sharing.values():
        value = public()[first]
        links = [f"[`{name}`]({address(name)})" for name in (first, *others)]
        parts += [f"## Options of {first}", "", f"Of {', '.join(links)}.", ""]
        parts += [*_option_rows(first, value, shared_arguments(value)), ""]
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
        parts += [f"### {title}", "", summary(make), ""]
        parts += [*_codec_rows(make, fields), ""] if fields else ["No options.", ""]
    return "\n".join(parts)


def _option_rows(name: str, value: Callable[..., Any], arguments: Iterable[str]) -> Iterator[str]:
    yield "| argument | type | default | meaning |"
    yield "|---|---|---|---|"
    meanings = argument_meanings(name, value)
    for key in arguments:
        parameter = option_parameters(value)[key]
        cells = (
            f"`{key}`",
            code_text(type_text(parameter.annotation)),
            default_text(parameter),
            cell(meanings[key]),
        )
        yield f"| {' | '.join(cells)} |"


def _codec_rows(make: Any, fields: Mapping[str, Any]) -> Iterator[str]:
    meanings = documented(make)
    yield "| option | default | valid | meaning |"
    yield "|---|---|---|---|"
    for key, field in fields.items():
        if not meanings.get(key):
            raise Undocumented(f"{make.__name__}: option {key!r} is not in the docstring")
        yield f"| `{key}` | `{value_text(field.default)}` | {cell(field.metadata['valid'])} | {cell(meanings[key])} |"


def _shared_words() -> Iterator[str]:
    """The defaults of each word that at least two integrations have."""
    columns = {name: option_parameters(public()[name]) for name in INTEGRATIONS}
    words = {word: None for parameters in columns.values() for word in parameters}
    yield " | ".join(["| argument", *(f"`{name.removeprefix('dtcomm.')}`" for name in columns)]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for word in words:
        having = [parameters.get(word) for parameters in columns.values()]
        if sum(parameter is not None for parameter in having) > 1:
            cells = [
                "" if parameter is None else default_text(parameter) or "required" for parameter in having
            ]
            yield f"| `{word}` | {' | '.join(cells)} |"
    yield "\nWhere a word is missing:\n"
    yield from (f"- `{word}`: {reason}" for word, reason in WHY_NOT.items())


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
                rows += [f"| `{each.dest}` | {cell(each.help or '')} |" for each in action._choices_actions]
                continue
            name = "/".join(action.option_strings) or action.dest
            if not action.help or action.help == argparse.SUPPRESS:
                raise Undocumented(f"{parser.prog}: {name} has no help")
            rows.append(f"| {_invocation(formatter, action)} | {cell(formatter._expand_help(action))} |")
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
    return escape(" ".join(text.split()))


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
    "api/index.md": api_index,
    **{f"api/{page}.md": functools.partial(api_page, page) for page in API},
}


def text_of(name: str) -> str:
    """The whole text of a page in ``FOLDER``."""
    comment = "<!-- Generated by `make reference` from the code; change the code, not this page. -->"
    return f"{comment}\n\n{PAGES[name]().rstrip()}\n"


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / page).write_text(text_of(page), encoding="utf-8")
