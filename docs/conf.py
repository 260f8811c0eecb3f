"""Sphinx's settings for the site. Its sources are written by tools/website.py into docs/_pages/."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT)]

import website  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.addnodes import pending_xref  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.environment import BuildEnvironment  # noqa: E402
from sphinx.util.nodes import make_refnode  # noqa: E402

project = "walkvllm"
author = "the walkvllm contributors"
copyright = "the walkvllm contributors, Apache-2.0"  # noqa: A001
extensions = ["myst_nb", "sphinx.ext.linkcode"]

nb_execution_mode = "off"  # what the notebooks have stored is what the site shows
nb_merge_streams = True
nb_code_prompt_show = nb_code_prompt_hide = "imports"
nb_mime_priority_overrides = [("html", "text/html", 0)]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]  # a page may go from its title to a third-level heading
python_maximum_signature_line_length = 84
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "walkvllm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["_pages/_extra"]
exclude_patterns = ["_extra/**"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "github-light-high-contrast", "github-dark"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The line of an entry of the reference in the source pages; the reference's pages all lie in api/."""
    for m in website.modules():
        if domain == "py" and m.name == info["module"]:
            for d in m.definitions:
                if d.name == info["fullname"]:
                    return f"../src/{m.short}.html#L-{d.line}"
    return None


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for the source of each module."""
    for m in website.modules():
        yield f"src/{m.short}", {"title": f"Source of {m.name}", "body": website.source_page(m)}, "page.html"


def find_type(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.Element) -> nodes.Element | None:
    """A type in a signature by its bare name, wherever the project defines it."""
    name = node.get("reftarget", "").rpartition(".")[2]
    homes = [m for m in website.modules() for d in m.definitions if d.name == name and website.in_reference(d)]
    if node.get("refdomain") != "py" or len(homes) != 1:
        return None
    target = f"{homes[0].name}.{name}"
    return make_refnode(app.builder, node["refdoc"], f"api/{homes[0].short}", target, [text], target)


def setup(app: Sphinx) -> None:
    app.connect("html-collect-pages", source_pages)
    app.connect("missing-reference", find_type)
