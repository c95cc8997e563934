"""The style of the command line's plots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
