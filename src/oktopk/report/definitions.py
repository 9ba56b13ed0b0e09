"""`docs/accounting.md`, which defines every figure, as it travels with the package and inside each page."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

NAME = "accounting.md"


def accounting() -> str:
    """Return the text: the package's copy, or the checkout's own file."""
    packed = files("oktopk.report") / NAME
    return packed.read_text("utf-8") if packed.is_file() else _in_checkout().read_text("utf-8")


def _in_checkout() -> Path:
    return Path(__file__).parents[3] / "docs" / NAME


def anchor(heading: str) -> str:
    """Return the id of a heading.

    >>> anchor("Nominal figures (the literature's)")
    'def-nominal-figures-the-literature-s'
    """
    return "def-" + re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def as_html() -> str:
    """Return the text as HTML, every heading with its id."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(accounting())
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", anchor(inline.content))
    return str(markdown.renderer.render(tokens, markdown.options, {}))
