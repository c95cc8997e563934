"""Command ``dtcomm tp inspect``: propose which layers of a model can be cut over the ranks, and say why.

The model is made on the meta device, so a model of any size is inspected without its memory. `dtcomm.tp.propose_plan`
does the work.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtcomm.cli.tp.model_argument import call_function
from dtcomm.tp.hf_transformers import from_config
from dtcomm.tp.propose import propose_plan

HELP = """\
MODEL is one of
  a folder with a model of transformers, of which config.json is read and nothing is downloaded,
  a model type of transformers, such as llama or olmo2, with the sizes of its default configuration,
  package.module:function: a function without arguments that returns a torch.nn.Module."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command's arguments to the subcommands of ``dtcomm tp``."""
    command: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="propose a plan for a model",
        description="Propose which layers of a model can be cut over the ranks, and say why the others cannot.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "model", metavar="MODEL", help="a folder, a model type or package.module:function; see below"
    )
    command.add_argument("--ranks", type=int, default=2, help="number of ranks that share each layer (2)")
    command.add_argument(
        "--vocabulary", action="store_true", help="cut the embedding and the output layer too"
    )
    command.add_argument(
        "--out", type=Path, help="write a plan file, for dtcomm.tp.compress(model, mesh, plan=...)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def run(options: argparse.Namespace) -> int:
    """Run the command; return 0, or 2 if an argument or a file is wrong."""
    try:
        proposal = propose_plan(make_model(options.model), options.ranks, vocabulary=options.vocabulary)
        if options.out is not None:
            proposal.write(options.out)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"dtcomm tp inspect: {error}", file=sys.stderr)
        return 2
    print(json.dumps(proposal.to_dict(), indent=1) if options.json else proposal)
    if options.out is not None:
        print(
            f"Wrote {options.out}: dtcomm.tp.compress(model, mesh, plan={str(options.out)!r})",
            file=sys.stderr,
        )
    return 0


def make_model(text: str) -> nn.Module:
    """Return the model that MODEL names, on the meta device.

    Raises:
        RuntimeError: transformers is needed and not installed.
        ValueError: There is no such model.
    """
    with torch.device("meta"):
        if ":" in text:
            model = call_function(text)
            if not isinstance(model, nn.Module):
                raise ValueError(f"MODEL: {text} returned {type(model).__name__}; expected a torch.nn.Module")
            return model
        return from_config(text)
