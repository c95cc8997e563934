"""Sphinx configuration. `make docs` builds the pages with warnings as errors."""

from __future__ import annotations

project = "dtcomm"
author = copyright = "the dtcomm authors"
extensions = ["myst_parser", "sphinx_copybutton"]
templates_path: list[str] = []
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dtcomm"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

copybutton_exclude = ".linenos, .gp, .go"
