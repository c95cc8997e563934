"""Entry point of ``dtcomm <command> ...``: imports the command's module and calls its ``main``.

A command is a module with ``main(argv) -> exit status``. It is imported only when it is called, so that ``dtcomm
--help`` does not import torch.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

# name -> (module, one line of help)
COMMANDS = {
    "run": ("dtcomm.cli.run", "run a training script and compress the DDP and FSDP2 modules that it makes"),
    "perf": ("dtcomm.cli.perf", "measure collectives like nccl-tests, also those of torch.distributed"),
    "demo": (
        "dtcomm.cli.demo",
        "train a small language model in memory and over an emulated link, and show what compression gains",
    ),
    "codecs": ("dtcomm.cli.codecs", "measure the size, error and speed of each codec"),
    "plan": (
        "dtcomm.extensions.jobs.command",
        "predict collectives, training steps and whole jobs on a given system",
    ),
    "trace": ("dtcomm.cli.trace", "merge the ranks' timelines of a training run and summarize them"),
    "tp": (
        "dtcomm.extensions.calibrate.command",
        "tensor parallelism: choose a codec for each layer of a model (calibrate)",
    ),
    "coordinator": (
        "dtcomm.extensions.elastic.coordinator",
        "serve the ranks of a training run whose ranks come and go",
    ),
    "weights": (
        "dtcomm.extensions.weights.command",
        "patches between checkpoints; serve new weights to engines",
    ),
    "exact": (
        "dtcomm.extensions.extras.exact_command",
        "check exact sums against files of inputs and expected bits",
    ),
    "tune": ("dtcomm.cli.tune", "measure this machine and write the table that algorithm=auto uses"),
    "doctor": ("dtcomm.cli.doctor", "check this machine and run a self-test of the engine"),
}

#: What the help lists under which heading, in this order; every command is in one group.
GROUPS = {
    "start": ("demo", "doctor", "run"),
    "measure": ("perf", "codecs", "trace", "exact"),
    "plan": ("plan", "tune", "tp"),
    "operate": ("coordinator", "weights"),
}

EXTRAS = ("rich", "matplotlib")  # of the extra `cli`


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status, or 2 if there is no such command."""
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
        print(f"dtcomm: {name!r} is not a command; valid: {valid}", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(COMMANDS[name][0])
        return int(command.main(arguments[1:]))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dtcomm.extensions"):
            print(f"dtcomm {name}: {error.name} is missing in this installation of dtcomm", file=sys.stderr)
            return 2
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"dtcomm {name}: {missing} is not installed: pip install {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the pipe has exited; without this the interpreter reports the error again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def usage() -> str:
    lines = ["usage: dtcomm <command> [options]"]
    for group, names in GROUPS.items():
        lines += ["", group, *(f"  {name:<11} {COMMANDS[name][1]}" for name in names if name in COMMANDS)]
    more = "dtcomm <command> --help describes a command; dtcomm --version prints the version."
    return "\n".join([*lines, "", more])


def _version() -> str:
    import dtcomm

    return dtcomm.__version__
