"""The documentation as a site: `make docs` builds it, and fails on a dead link or a name that is not there."""

from __future__ import annotations

import re

import oktopk

project = "oktopk"
author = "the oktopk authors"
version = release = oktopk.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"oktopk {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["figures.css"]
default_role = "literal"  # docstrings are Markdown: `x` is code
myst_heading_anchors = 4
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]

TERM = re.compile(r"(\w+(?:, \w+)*(?:\(.*?\))?) {2,}(\S.*)")


def as_rst(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn the tables of arguments in our docstrings (a name, spaces, text) into definition lists."""
    out: list[str] = []
    for line in lines:
        if found := TERM.fullmatch(line):
            out += ["", found[1], f"    {found[2]}"]
        elif out and line.startswith("        "):
            out.append(f"    {line.strip()}")
        else:
            ends = line and not line.startswith(" ") and out and out[-1].startswith("    ")
            out += ["", line] if ends else [line]
    lines[:] = out


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", as_rst)  # type: ignore[attr-defined]
