"""``dtcomm <command> …``: finds the command's module and hands it the rest of the line.

A command is one module in this folder with ``main(argv) -> exit status``; it is imported when it is called, so
that ``dtcomm --help`` does not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys

COMMANDS = {
    "perf": "measure collectives, as nccl-tests does, beside torch.distributed",
    "demo": "train a small language model on two ranks with compressed gradients",
    "codecs": "what each codec costs and what error it makes",
    "plan": "what a codec and an algorithm would gain on a given link",
    "trace": "the ranks' timelines of a training run as one, with a table and a picture",
    "tp": "tensor parallelism: which codec each layer of a model can bear (dtcomm tp calibrate)",
    "tune": "measure this machine and write the table that algorithm=auto reads",
    "doctor": "what dtcomm found on this machine, and whether its engine works",
}


def available() -> dict[str, str]:
    """The commands whose module is there, with one line on each."""
    return {name: line for name, line in COMMANDS.items() if importlib.util.find_spec(f"dtcomm.cli.{name}")}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit status, 2 where there is no such command."""
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"dtcomm {_version()}")
        return 0
    if name not in available():
        valid = ", ".join(available())
        print(f"dtcomm: {name!r} is not a command; the commands are {valid}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"dtcomm.cli.{name}")
    try:
        return int(command.main(arguments[1:]))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has left; without this the interpreter complains once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def usage() -> str:
    lines = [f"  {name:<8} {line}" for name, line in available().items()]
    return "\n".join(
        ["usage: dtcomm <command> [options]", "", *lines, "", "dtcomm <command> --help says more of each."]
    )


def _version() -> str:
    import dtcomm

    return dtcomm.__version__
