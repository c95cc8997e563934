"""The commands, and what several of them share: lists of codecs, byte counts as people write them, and output.

Sizes have a unit K, M, G or T (1K, 64M, 1.5G), where K is 1024 as in nccl-tests.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dtcomm.system import write_file

if TYPE_CHECKING:
    from rich.table import Table

#: What torchrun sets; with these a command runs as one rank of a job.
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def split_codecs(texts: Iterable[str]) -> list[str]:
    """Return the codec specs of flags that may be repeated and hold several specs, separated by commas.

    A comma also separates the options of a codec: what looks like ``name=value`` belongs to the codec before it.

    Example:
        >>> split_codecs(["int8,int4:block=128,spikes=1", "none"])
        ['int8', 'int4:block=128,spikes=1', 'none']
    """
    specs: list[str] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            if number and re.match(r"\w+=", part):
                specs[-1] += f",{part}"
            else:
                specs.append(part.strip())
    return specs


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes of a number with an optional unit K, M, G or T (``KB`` and ``KiB`` mean the same).

    ValueError if ``text`` is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError(f"{text!r} is not a size; valid: 4096, 1K, 64M, 1.5G")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def size_argument(least: int) -> Callable[[str], int]:
    """Return an argparse type for a size of at least ``least`` bytes."""

    def convert(text: str) -> int:
        try:
            size = parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if size < least:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {format_size(least)} bytes")
        return size

    return convert


def count_argument(least: int) -> Callable[[str], int]:
    """Return an argparse type for a whole number of at least ``least``."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return convert


def format_size(size: int) -> str:
    """Return the shortest exact text of ``size``, which ``parse_size`` reads back."""
    for unit in "TGMK":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def series(smallest: int, largest: int, step: int, factor: int) -> list[int]:
    """Return the sizes from ``smallest`` to ``largest``, growing by ``factor`` if it is above 1, else by ``step``.

    ValueError if they do not grow.
    """
    sizes = [smallest]
    while (size := sizes[-1] * factor if factor > 1 else sizes[-1] + step) <= largest:
        if size <= sizes[-1]:
            raise ValueError(f"sizes do not grow from {sizes[-1]}")
        sizes.append(size)
    return sizes


def show_progress(text: str = "") -> None:
    """Write what is measured over the last line of stderr, or clear that line; nothing if stderr is not a terminal.

    No thread draws it, since that would disturb the measurement.
    """
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


def write_json(values: Mapping[str, Any], target: str | None, *, allow_nan: bool = False) -> bool:
    """Write JSON to a file, to standard output for ``-``, or not at all for None; return whether to print tables."""
    if target is None:
        return True
    text = json.dumps(values, indent=1, allow_nan=allow_nan) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return False
    write_file(target, text)
    return True


def new_table(columns: Sequence[str], title: str | None = None, *, plain: bool = False) -> Table:
    """Return a table of rich; ``>`` before the name of a column aligns it right, ``~`` folds what is too wide.

    A ``plain`` table has no lines but the one below its heads.
    """
    from rich import box
    from rich.table import Table as RichTable

    style: dict[str, Any] = (
        {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False} if plain else {}
    )
    table = RichTable(title=title, title_justify="left", **style)
    for column in columns:
        name = column.lstrip(">~")
        marks = column.removesuffix(name)
        fold = "~" in marks
        align: Any = "right" if ">" in marks else "left"
        table.add_column(name, justify=align, overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    return table


INK = "#2b2b33"
GREY = "#8a8a94"
#: Grey for the baseline, then colours that are distinguishable with colour blindness.
COLOURS = ("#9a9aa4", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")

STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e8e8ec",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@contextmanager
def styled_pyplot() -> Iterator[Any]:
    """Yield matplotlib's pyplot in this style; it draws to files, so that no display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        yield pyplot
