"""The README as a package index shows it: links into the repository lead nowhere there."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"<picture>.*?</picture>\n\n\*.*?\*\n\n", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")


def without_local_links(readme: str) -> str:
    """Return the README with the texts of links to files, and without the picture and the line below it."""
    return LINK.sub(r"\1", PICTURE.sub("", readme))


class ReadmeHook(MetadataHookInterface):
    """Sets the readme of a wheel and of a source distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the readme to the project's metadata."""
        text = without_local_links((Path(self.root) / "README.md").read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
