"""Command ``dtcomm tp``: plans of tensor parallelism, proposed for a model or calibrated on text."""

from __future__ import annotations

import argparse

from dtcomm.cli.tp import calibrate, inspect


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return 0, or 2 if an argument or a file is wrong."""
    parser = argparse.ArgumentParser(prog="dtcomm tp")
    commands = parser.add_subparsers(required=True, metavar="{inspect,calibrate}")
    for command in (inspect, calibrate):
        command.add_parser(commands).set_defaults(run=command.run)
    options = parser.parse_args(argv)
    return int(options.run(options))
