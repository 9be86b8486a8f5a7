"""Sphinx configuration of the documentation site: `make site`.

The pages are plain Markdown that any forge shows as it is. Everything that only the site needs is here: the
navigation, and links to files outside of this folder, which become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

project = "streams"
author = "The streams authors"
version = release = re.findall(r'__version__ = "(.*)"', (DOCS.parent / "streams/__init__.py").read_text())[0]

extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_block"]
myst_heading_anchors = 4
#: Code blocks of other languages than Pygments knows, and blocks that are more than their language.
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "none"

html_theme = "furo"
html_title = f"streams {version}"
html_favicon = "images/icon.svg"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "footer_icons": [],
    "light_css_variables": {"color-brand-primary": "#0b6e99", "color-brand-content": "#0b6e99"},
    "dark_css_variables": {"color-brand-primary": "#58b8e0", "color-brand-content": "#58b8e0"},
}

#: The navigation: each caption with its pages; a folder means all its pages by name.
NAVIGATION: dict[str, list[str]] = {
    "Start": ["tutorial/first-steps", "comparison", "glossary"],
    "How to": ["howto/"],
    "Cookbook": ["cookbook/index"],
    "Examples": ["examples/"],
    "Coming from": ["coming-from/"],
    "Explanation": ["explanation/"],
    "Reference": ["reference/"],
    "Contracts and decisions": ["spec/", "decisions/", "contributing"],
}
_outside = re.compile(r"\[([^\]]+)\]\((\.\./[^)]*)\)")


def _pages(entry: str) -> list[str]:
    if not entry.endswith("/"):
        return [entry]
    return [str(page.relative_to(DOCS).with_suffix("")) for page in sorted((DOCS / entry).rglob("*.md"))]


def _toctree(caption: str, pages: list[str]) -> str:
    if not pages:
        return ""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def _prepare(app: Any, docname: str, source: list[str]) -> None:
    """Add the navigation to the first page, and make text of links that leave this folder."""
    text = source[0]
    folder = (DOCS / docname).parent

    def link(match: re.Match[str]) -> str:
        target = (folder / match[2].partition("#")[0]).resolve()
        return match[0] if target.is_relative_to(DOCS) else match[1]

    text = _outside.sub(link, text)
    if docname == "index":
        text += "\n\n" + "\n".join(
            _toctree(caption, [page for entry in entries for page in _pages(entry)])
            for caption, entries in NAVIGATION.items()
        )
    elif docname == "cookbook/index":
        recipes = sorted(page.stem for page in (DOCS / "cookbook").glob("*.md") if page.stem != "index")
        text += "\n\n" + _toctree("", recipes).replace(":caption: \n", "")
    source[0] = text


def _move_inline_parts(app: Any, error: Exception | None) -> None:
    """Move inline scripts and styles of all pages to files, so that a server can forbid inline ones."""
    if error is not None or app.builder.name != "html":
        return
    static = Path(app.outdir) / "_static"
    for page in sorted(Path(app.outdir).rglob("*.html")):
        text = page.read_text()
        up = "../" * (len(page.relative_to(app.outdir).parts) - 1)
        for begin, end, name, tag in (
            ("<script>", "</script>", "theme.js", '<script src="{}"></script>'),
            ("<style>", "</style>", "colors.css", '<link rel="stylesheet" type="text/css" href="{}" />'),
        ):
            for content in re.findall(f"{begin}(.*?){end}", text, re.DOTALL):
                (static / name).write_text(content)
                text = text.replace(begin + content + end, tag.format(f"{up}_static/{name}"))
        text = text.replace(' style="display: none;"', ' display="none"')
        text = text.replace(' style="opacity: 50%"', ' opacity="0.5"')
        page.write_text(text)


def setup(app: Any) -> None:
    app.connect("source-read", _prepare)
    app.connect("build-finished", _move_inline_parts)
