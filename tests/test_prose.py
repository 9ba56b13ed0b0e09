"""Rules of prose that a machine can check."""

import ast
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import oktopk
from hatch_build import without_local_links

ROOT = Path(__file__).parent.parent
WIDTH = 100
WORDS = 25
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if page.stem != "CHANGELOG" and page.parent.name != "results"
)


def too_wide(text: str) -> list[int]:
    """Return the numbers of the lines above `WIDTH` characters that are no table, code block or lone link."""
    is_code, wide = False, []
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.startswith("```")
        if len(line) > WIDTH and not is_code and not line.startswith(("|", "    ", "  <img")) and " " in line.strip():
            wide.append(number)
    return wide


def long_sentences(text: str) -> list[str]:
    """Return the sentences and table cells above `WORDS` words, or with a second semicolon; code is one word."""
    text = re.sub(r"(?ms)^```.*?^```|^    .*?$|^<picture>.*?</picture>", "", text)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    parts = re.split(r"\n\s*\n|\n(?=[-#|]|\d+\. )|\s\|\s|(?<=[.:?!])\W*\s", text)
    return [
        " ".join(part.split()) for part in parts if len(re.findall(r"\S*\w\S*", part)) > WORDS or part.count(";") > 1
    ]


def headless(source: str) -> list[str]:
    """Return the docstrings that begin without a noun."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [text.splitlines()[0] for text in found if text.startswith(("Return what", "What "))]


def missing(page: Path) -> list[str]:
    """Return the files that a page links to, or names with a path from the root, and that do not exist."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    paths = re.findall(r"(?<![\w/.-])((?:src|tests|docs|benchmarks|research|examples)/[\w./-]+\.\w+)", text)
    files = {link: page.parent / link for link in links if "://" not in link} | {path: ROOT / path for path in paths}
    return sorted(name for name, file in files.items() if not file.exists())


def not_shown_as_code(text: str) -> list[str]:
    """Return the lines that are indented as code and shown as text, as after an item of a list."""
    blocks = [token.map for token in MarkdownIt().parse(text) if token.type in ("code_block", "fence") and token.map]
    code = {line for first, end in blocks for line in range(first, end)}
    lines = ["", *text.splitlines()]
    return [
        line
        for number, (before, line) in enumerate(pairwise(lines))
        if line.startswith("    ") and not before.strip() and number not in code
    ]


def made_by_commands() -> set[str]:
    """Return the files and folders that the commands in README and docs write."""
    texts = "".join((ROOT / page).read_text() for page in PAGES)
    commands = re.findall(r"(?m)^(?:    |\$ )?((?:sudo )?(?:oktopk|python -m) .*)$", texts)
    options = r" (?:--out|-o|--csv|--results|--runs) ([a-z][\w/.-]*)"
    return {name for command in commands for name in re.findall(options, command)} | {"runs/NAME", "report.html"}


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_short_sentences_are_wrapped_and_name_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not long_sentences(text)
    assert not too_wide(text)
    assert not missing(ROOT / page)
    assert not not_shown_as_code(text)


def test_git_ignores_what_the_documented_commands_make() -> None:
    names = made_by_commands()
    assert names >= {"results", "both.html", "data/an4", "mutants.jsonl"}
    asked = ["git", "check-ignore", "--no-index", *(f"{name}/x" if "." not in name else name for name in names)]
    ignored = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(ignored) == len(names), (names, ignored)


def test_the_readme_of_a_wheel_links_to_nothing_that_is_not_there() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = without_local_links(readme)
    assert not re.search(r"\]\((?!https?://)|<img|<picture", shown)
    assert len(shown.splitlines()) > len(readme.splitlines()) - 12


def test_docstrings_name_their_noun() -> None:
    files = (ROOT / "src/oktopk").rglob("*.py")
    assert not {file.name: lines for file in files if (lines := headless(file.read_text()))}


def test_the_checks_notice(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "[a](gone.md#part) [b](page.md) [c](https://d) `src/gone.py`, `src/oktopk/cost.py`"
    )
    assert missing(tmp_path / "page.md") == ["gone.md", "src/gone.py"]
    assert too_wide("x " * 60) == [1]
    assert long_sentences(f"Short. {'x ' * 26}\n\n| a; b; c | d |") == [("x " * 26).strip(), "| a; b; c"]
    assert not_shown_as_code("text\n\n    code\n\n- item\n\n    no code\n") == ["    no code"]
    assert headless('"""What is large."""') == ["What is large."]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(r"^\.\. (?:auto\w+|data):: (\w+)", (ROOT / "docs/api.rst").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(oktopk.__all__)
