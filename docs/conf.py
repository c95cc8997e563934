"""Sphinx configuration. `make docs` builds the pages with warnings as errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Options", "params_style"), "Papers"]
napoleon_custom_sections = [("Options", "params_style"), ("Modules", "params_style")]
# Docstrings write code in single backticks, as Markdown does.
default_role = "literal"
copybutton_exclude = ".linenos, .gp, .go"

COMMANDS = ("perf", "demo", "codecs", "plan", "trace", "tp", "tune", "doctor")


def write_environment(folder: Path) -> None:
    """The table of environment variables, from dtcomm/env.py."""
    from dtcomm import env

    lines = ["| variable | default | meaning | values |", "|---|---|---|---|"]
    for name, variable in env.VARIABLES.items():
        default = f"`{variable.default}`" if variable.default else ""
        values = ", ".join(f"`{choice}`" for choice in variable.choices)
        shared = " Equal on all ranks." if variable.shared else ""
        meaning = variable.meaning.replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {meaning}.{shared} | {values} |")
    (folder / "environment.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_command_line(folder: Path) -> None:
    """The help text of every command, as it prints it."""
    sections = []
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1"}
    for arguments in ([], *([command] for command in COMMANDS)):
        command = [sys.executable, "-m", "dtcomm", *arguments, "--help"]
        text = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        ).stdout
        title = " ".join(["dtcomm", *arguments])
        sections.append(f"## {title}\n\n```text\n{text.rstrip()}\n```\n")
    (folder / "command-line.md").write_text("\n".join(sections), encoding="utf-8")


def setup(app: Any) -> None:
    """Write the generated parts before Sphinx reads the pages."""
    folder = Path(app.srcdir) / "reference" / "_generated"
    folder.mkdir(exist_ok=True)
    write_environment(folder)
    write_command_line(folder)
    app.config.exclude_patterns.append("reference/_generated/*")
