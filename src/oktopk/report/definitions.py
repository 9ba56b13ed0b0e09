"""`docs/accounting.md`, which defines every figure: linked into the package, and inside each page."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import pairwise


def accounting() -> str:
    """Return the text."""
    return (files("oktopk.report") / "accounting.md").read_text("utf-8")


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
