"""Command ``dtcomm plan``: predict collective times on hardware you do not own, and whether a codec would pay.

`flags` declares the arguments of the subcommands and `options` says what they stand for. `training` has training steps,
`job` whole jobs, and `report` the output.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from dtcomm import env
from dtcomm.arguments import suggest
from dtcomm.cli import write_json
from dtcomm.extensions.jobs.command import flags, job, report
from dtcomm.extensions.jobs.command.options import (
    algorithm_names,
    codec_specs,
    message_sizes,
    step_options,
    system_of,
)
from dtcomm.extensions.jobs.command.training import Training, of_model
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.sweep import Sweep, run_sweep
from dtcomm.planner import parse as parse_table
from dtcomm.planner.cost_model import Table

DESCRIPTION = "Predict the time of a collective, a training step or a whole job, and the gain of codecs."


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return 0, or 1 if a job fits nowhere, or 2 without a subcommand.

    Exits with status 2 and a line that names the argument if one is wrong.
    """
    words = sys.argv[1:] if argv is None else argv
    parser, commands = _parsers()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] in commands:
        _refuse_unknown_flags(commands[words[0]], words[1:])
    arguments = parser.parse_args(words)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except ValueError as error:
        commands[arguments.command].error(str(error))


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command and those of its subcommands."""
    options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    first = [f"  dtcomm plan {command.examples[0]}" for command in COMMANDS.values()]
    parser = _Parser(
        prog="dtcomm plan", description=DESCRIPTION, epilog="\n".join(["examples", *first]), **options
    )
    group = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        lines = ["examples", *(f"  dtcomm plan {line}" for line in command.examples)]
        own = group.add_parser(
            name, help=command.help, description=f"Predict {command.help}.", usage=f"%(prog)s {command.usage}",
            epilog="\n".join([*lines, "", command.note] if command.note else lines),
            add_help=False, **options,
        )  # fmt: skip
        own.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        command.add_flags(own)
    return parser, dict(group.choices)


def _refuse_unknown_flags(parser: _Parser, words: Sequence[str]) -> None:
    """Refuse unknown flags before their values are taken for something else."""
    known = [name for action in parser._actions for name in action.option_strings]
    for flag in (word.partition("=")[0] for word in words):
        if re.match("--[a-z]", flag) and not any(name.startswith(flag) for name in known):
            parser.error(f"{flag}: no such flag{suggest(flag, known)}")


def _collective(arguments: argparse.Namespace) -> int:
    system = system_of(arguments)
    table = _table(arguments, system)
    what = arguments.collective, message_sizes(arguments), codec_specs(arguments), algorithm_names(arguments)
    _write(arguments, [run_sweep(system, *what, arguments.datatype, table)], None)
    return 0


def _step(arguments: argparse.Namespace) -> int:
    options = step_options(arguments)
    table = _table(arguments, options.system)
    training = of_model(options, table)
    _write(arguments, [messages.sweep for messages in training.messages], training)
    return 0


class _Command(NamedTuple):
    """A subcommand: its line in the list, what follows its name in its usage, its arguments, and what runs it."""

    help: str
    usage: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: tuple[str, ...]
    note: str = ""


COMMANDS = {
    "collective": _Command(
        "one collective on links: algorithm, codec, time, bytes that leave a host",
        "[COLLECTIVE] [options]",
        flags.add_collective,
        _collective,
        (
            "collective all_reduce --system h100 --hosts 2 -b 1M -e 8G --codec int8",
            "collective --inside nvlink4 --between 400gbit --hosts 4",
        ),
        "algbw and busbw count uncompressed bytes, as nccl-tests does; GB is 1e9 bytes,\n"
        "K, M and G are powers of 1024. docs/how-it-works/planner.md describes the models.",
    ),
    "step": _Command(
        "a training step of DDP or FSDP on links: its time, and which codec pays",
        "[ddp|fsdp] --model K=V,… [options]",
        flags.add_step,
        _step,
        (
            "step --inside memory --between 10gbit --hosts 2 --model 1B,step_ms=900",
            "step fsdp --system h100 --hosts 8 --model 70B,tokens=8192,dtype=bf16",
        ),
        "In params and tokens K, M, B and T are powers of 1000.",
    ),
    "job": _Command(
        "a whole job on GPUs: the best layout over DP, ZeRO, TP, PP, CP and EP",
        "--model NAME [options]",
        flags.add_job,
        job.plan_job,
        ("job --model llama-70b --system h100 --hosts 8 --seq 8192 --batch 512",),
    ),
    "sites": _Command(
        "a whole job across sites: DDP, DiLoCo and Streaming DiLoCo over slow links",
        "--model NAME --wan LINK [options]",
        flags.add_sites,
        job.plan_job,
        ("sites --model llama-8b --system h100 --sites 2 --wan 1gbit --every 100",),
    ),
}


def _table(arguments: argparse.Namespace, system: System) -> Table:
    # The user's table was measured on this machine and does not apply to other systems.
    if arguments.table is not None:
        return parse_table(arguments.table.read_text())
    return parse_table(env.tune_text() if system.name == "local" else "")


def _write(arguments: argparse.Namespace, sweeps: Sequence[Sweep], training: Training | None) -> None:
    if write_json(as_dict(sweeps, training), arguments.json):
        report.print_plan(sweeps, training)


def as_dict(sweeps: Sequence[Sweep], training: Training | None) -> dict[str, Any]:
    """Return JSON values; times in microseconds, bandwidths in GB/s (1e9)."""
    first = sweeps[0]
    rows = [row for sweep in sweeps for row in sweep.rows]
    return {
        "version": 1, "system": first.system.as_dict(), "table": first.table.source,
        "collective": first.collective, "dtype": str(first.dtype).removeprefix("torch."),
        "results": [row.as_dict() for row in rows],
        "alternatives": [other.as_dict() for row in rows for other in row.others],
        "break_even_bytes": first.break_even, "verdicts": first.verdicts if training is None else [training.verdict],
        "assumptions": first.assumptions if training is None else training.assumptions,
        "not_estimated": sorted({name for sweep in sweeps for name in sweep.skipped}),
        **({} if training is None else {"model": training.as_dict()}),
    }  # fmt: skip
