"""Sphinx configuration. `make docs` builds the pages with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

project = "dtcomm"
author = copyright = "the dtcomm authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
templates_path: list[str] = []
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "dtcomm"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Options", "params_style"), ("Modules", "params_style")]
# Docstrings write code in single backticks, as Markdown does.
default_role = "literal"
copybutton_exclude = ".linenos, .gp, .go"
