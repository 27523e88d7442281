"""The pages of the documentation, read with a Markdown parser: their headings, links, code spans and code blocks."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
PAGES = tuple(
    sorted([*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *ROOT.glob("docs/**/*.md")])
)


@dataclass(frozen=True)
class Block:
    """A code block: ``language`` is the word after the fence, empty for an indented block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@functools.cache
def tokens(page: Path) -> Sequence[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def inline(page: Path) -> Iterator[tuple[int, Token]]:
    """Every inline token of a page (link, code, text) with the line its block starts at."""
    for token in tokens(page):
        for child in token.children or ():
            yield token.map[0] + 1 if token.map else 0, child


def blocks(page: Path) -> list[Block]:
    found = [token for token in tokens(page) if token.type in ("fence", "code_block")]
    return [Block(page, (token.map or [0])[0] + 1, token.info.strip(), token.content) for token in found]


def links(page: Path) -> list[tuple[int, str]]:
    """The targets of links and pictures, with their lines."""
    attributes = [(line, token.attrs.get("href", token.attrs.get("src"))) for line, token in inline(page)]
    return [(line, str(target)) for line, target in attributes if target is not None]


def code_spans(page: Path) -> list[tuple[int, str]]:
    return [(line, token.content) for line, token in inline(page) if token.type == "code_inline"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    all_tokens = tokens(page)
    titles = [after.children or () for before, after in itertools.pairwise(all_tokens) if before.type == "heading_open"]
    return {_slug("".join(part.content for part in title)) for title in titles}


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
