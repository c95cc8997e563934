"""``dtcomm <command> …``: finds the command's module and hands it the rest of the line.

A command is a module with ``main(argv) -> exit status``. It is imported when it is called, so that ``dtcomm --help``
does not import torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

# name -> (module of dtcomm.cli, one line of help)
COMMANDS = {
    "perf": ("perf.main", "measure collectives, as nccl-tests does, beside torch.distributed"),
    "demo": ("demo.main", "train a small language model on two ranks with compressed gradients"),
    "codecs": ("codecs.main", "what each codec costs and what error it makes"),
    "plan": ("plan.main", "what a codec and an algorithm would gain on a given link"),
    "trace": ("trace", "the ranks' timelines of a training run as one, with a table and a picture"),
    "tp": (
        "tp_calibrate",
        "tensor parallelism: which codec each layer of a model can bear (dtcomm tp calibrate)",
    ),
    "tune": ("tune.main", "measure this machine and write the table that algorithm=auto reads"),
    "doctor": ("doctor.main", "what dtcomm found on this machine, and whether its engine works"),
}


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
    if name not in COMMANDS:
        valid = ", ".join(COMMANDS)
        print(f"dtcomm: {name!r} is not a command; the commands are {valid}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"dtcomm.cli.{COMMANDS[name][0]}")
    try:
        return int(command.main(arguments[1:]))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has left; without this the interpreter complains once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def usage() -> str:
    lines = [f"  {name:<8} {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        ["usage: dtcomm <command> [options]", "", *lines, "", "dtcomm <command> --help says more of each."]
    )


def _version() -> str:
    import dtcomm

    return dtcomm.__version__
