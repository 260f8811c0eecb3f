"""Builds the website from the pages' stored outputs: python tools/website.py

The pages and the modules are turned into what Sphinx reads, in docs/_pages/; Sphinx writes docs/_build/html/.
Nothing is executed and nothing is fetched. Warnings are errors.
"""

from __future__ import annotations

import ast
import functools
import html
import json
import re
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import cells
import pages
from cells import ROOT

DOCS = ROOT / "docs"
PAGES, SITE = DOCS / "_pages", DOCS / "_build/html"
_HEADER = re.compile(r"^# %% \S*?nbs/(\S+)\.ipynb #(\S+)$")
_NB_LINK = re.compile(r'(href="(?!https?:)[^"#]*)\.ipynb')
_BARE = re.compile(r"^(route|in_vllm|played)\([^\n]*\)$")  # only a picture; the source says nothing more


# ---- what the modules define ----

@dataclass
class Definition:
    """A top-level name of a module, the cell that it comes from, and what it holds."""

    name: str
    node: ast.stmt
    page: str = ""
    cell: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def line(self) -> int:
        """The line of the definition, or of its first decorator."""
        return min([self.node.lineno] + [d.lineno for d in getattr(self.node, "decorator_list", [])])


@dataclass
class Module:
    """An exported module: walkvllm.kv_cache, its file and its definitions in order."""

    name: str
    path: Path
    doc: str
    definitions: list[Definition]
    page: str

    @property
    def short(self) -> str:
        return self.name.removeprefix(f"{pages.LIB}.")


@functools.cache
def modules() -> list[Module]:
    """The exported modules in the order of their pages."""
    found = []
    for folder, prefix in ((ROOT / pages.LIB, pages.LIB), (ROOT / pages.KERNELS, f"{pages.LIB}.kernels")):
        for path in sorted(folder.glob("*.py")):
            if path.name not in ("__init__.py", "_modidx.py"):
                found.append(_module(f"{prefix}.{path.stem}", path))
    order = [p.relative_to(pages.NBS).with_suffix("").as_posix() for p in route_order()]
    return sorted((m for m in found if m.page), key=lambda m: (order.index(m.page), m.name))


def _module(name: str, path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    lines, tree, found = text.splitlines(), ast.parse(text), []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name) and t.id != "__all__"]
        else:
            continue
        page, cell = next(((m[1], m[2]) for at in range(node.lineno - 1, -1, -1)
                           if (m := _HEADER.match(lines[at]))), ("", ""))
        found += [Definition(n, node, page, cell, lines) for n in names]
    where = re.search(r"File to edit: \S*?nbs/(\S+)\.ipynb\.", text)
    page = where[1] if where else ""
    return Module(name, path, ast.get_docstring(tree) or (summary(pages.notebook(page)) if page else ""), found, page)


@functools.cache
def by_cell() -> dict[tuple[str, str], list[tuple[Module, Definition]]]:
    """(page, cell id) -> what the modules hold from that cell."""
    found: dict[tuple[str, str], list[tuple[Module, Definition]]] = {}
    for module in modules():
        for d in module.definitions:
            found.setdefault((d.page, d.cell), []).append((module, d))
    return found


def in_reference(d: Definition) -> bool:
    """Whether the reference has an entry for a definition: public classes and functions."""
    return not d.name.startswith("_") and isinstance(d.node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


# ---- the pages ----

def route_order() -> list[Path]:
    """The notebooks in the order of the request's path; what lies beside the route comes last."""
    found = [p for p in cells.pages(pages.NBS) if p.stem != "index"]
    return sorted(found, key=lambda p: (p.stem.startswith("00"), p.name))


def title(path: Path) -> str:
    found = re.search(r"^# (.+)$", cells.read(path)["cells"][0]["source"], re.M)
    return found[1] if found else path.stem


def summary(path: Path) -> str:
    """The summary line of a page, for its second module, which has no docstring of its own."""
    found = re.search(r"^> (.+)$", cells.read(path)["cells"][0]["source"], re.M)
    return found[1] if found else ""


def notebook(path: Path) -> dict[str, Any]:
    """A page as the site shows it: hidden cells gone, the route on top, marks at what is exported."""
    nb, stem = cells.read(path), path.relative_to(pages.NBS).with_suffix("").as_posix()
    top, shown = "../" * stem.count("/"), []
    for cell in nb["cells"]:
        source, marks = cell["source"], cells.directives(cell["source"])
        if cell["cell_type"] == "markdown":
            shown.append(_markdown(re.sub(r"\]\(\.\./CONTRIBUTING\.md\)", "](contributing.md)", source)))
            continue
        if "hide" in marks or "default_exp" in marks or not source.strip():
            continue
        if source.startswith("route(") and stem != "index":
            continue  # it is drawn on top
        shown += _code(cell, source, marks, stem, top)
    number = path.stem.split("_")[0]
    if stem == "index":
        shown = _front(shown)
    else:
        shown.insert(1, _markdown(f'<div class="route-top">{_route(number)}</div>'))
    shown.append(_markdown(_open_box(stem, top)))
    for i, cell in enumerate(shown):
        cell.setdefault("id", f"site-{i}")
    meta = pages.NB_METADATA | {"language_info": {"name": "python", "pygments_lexer": "python3"}}
    return {"cells": shown, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}


def _markdown(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source}


def _code(cell: dict[str, Any], source: str, marks: dict[str, str], stem: str, top: str) -> list[dict[str, Any]]:
    """A code cell, with a line above it where it is exported. Its outputs are those that the notebook has stored."""
    lines = source.splitlines()
    while lines and (not lines[0].strip() or cells.directives(lines[0])):
        lines.pop(0)
    text = "\n".join(lines)
    outputs = [_output(o) for o in cell["outputs"]]
    tags = ["remove-input"] if _BARE.match(text.strip()) else ["hide-input"] if _only_imports(text) else []
    new = {"cell_type": "code", "id": cell["id"], "metadata": {"tags": tags}, "source": text,
           "outputs": outputs, "execution_count": None}
    if "export" in marks:
        place = f'<div class="place" id="cell-{cell["id"]}"></div>'  # source pages lead here, also to folded cells
        return [_markdown(place if tags else _export_mark(stem, cell["id"], top)), new]
    return [new]


def _only_imports(text: str) -> bool:
    """Whether a cell only imports, and perhaps names a logger, so that it can be folded away."""
    body = [n for n in ast.parse(text).body if not ast.unparse(n).startswith("logger = ")]
    return bool(body) and all(isinstance(n, ast.Import | ast.ImportFrom) or isinstance(n, ast.If)
                              and "TYPE_CHECKING" in ast.dump(n.test) for n in body)


def _output(out: dict[str, Any]) -> dict[str, Any]:
    """A stored output; its links lead to the site's pages."""
    data = out.get("data", {})
    if "text/html" in data:
        shown = _NB_LINK.sub(r"\1.html", "".join(data["text/html"]))
        return out | {"data": data | {"text/html": f'<div class="shown">{shown}</div>'}}
    return out


def _export_mark(stem: str, cell: str, top: str) -> str:
    """The line above an exported cell: what it defines in which module, linked to the source and the reference."""
    found = by_cell().get((stem, cell), [])
    where = {m.name: f"{top}src/{m.short}.html#L-{d.line}" for m, d in reversed(found)}
    links = [f'<a href="{href}" title="source">{name}</a>' for name, href in where.items()]
    names = [f'<a href="{top}api/{m.short}.html#{m.name}.{d.name}">{d.name}</a>' for m, d in found if in_reference(d)]
    into = f"exported to {', '.join(links)}" if links else "exported"
    return (f'<div class="export" id="cell-{cell}"><span>{into}</span>'
            + (f'<span>reference: {" ".join(names)}</span>' if names else "") + "</div>")


@functools.cache
def _route(number: str) -> str:
    from walkvllm.show import route
    return _NB_LINK.sub(r"\1.html", route(number).html)


def _open_box(stem: str, top: str) -> str:
    return (f'<div class="open-page"><strong>Open this page.</strong> It is a notebook. In a checkout of the project, '
            f'<code>make lab</code> starts JupyterLab; open <code>nbs/{stem}.ipynb</code> there, run its cells, change '
            f'them. Or <a href="{top}notebooks/{stem}.ipynb" download>download it</a>.</div>')


# ---- the front page ----

def _front(shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The index page. If it has no player of its own, the recorded walk stands before its first section."""
    if any(cell["source"].startswith("played(") for cell in shown):
        return shown
    first, rest = shown[0]["source"].split("\n## ", 1)
    return [_markdown(first), _walk(), _markdown(f"## {rest}"), *shown[1:]]


def _walk() -> dict[str, Any]:
    """A cell that shows the recorded walk as a player."""
    from walkvllm.player import played
    out = {"output_type": "display_data", "metadata": {},
           "data": {"text/html": played()._repr_html_(), "text/plain": repr(played())}}
    return {"cell_type": "code", "metadata": {"tags": ["remove-input"]}, "source": "played()", "execution_count": None,
            "outputs": [_output(out)]}


# ---- the reference ----

def _escape(doc: str) -> str:
    """A docstring as Markdown: what stands in backticks is code, everything else is plain."""
    parts = re.split(r"(`[^`\n]+`)", doc)
    return "".join(p if p.startswith("`") else re.sub(r"([\\*_<>\[\]|{}$#~^:])", r"\\\1", p) for p in parts)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> str:
    args = ast.parse(ast.unparse(node)).body[0].args  # type: ignore[attr-defined]
    plain = not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if method and plain:
        (args.posonlyargs or args.args or [None]).pop(0)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(args)}){returns}"


def _comment(d: Definition, line: int) -> str:
    """The comment at the end of a line of a module."""
    found = re.search(r"\s{2}# (.+)$", d.lines[line - 1])
    return found[1] if found else ""


def _entry(kind: str, head: str, body: str, options: str = "", fence: str = "````") -> str:
    return f"{fence}{{py:{kind}}} {head}\n{options}\n{body}\n{fence}\n"


def _class(m: Module, d: Definition) -> str:
    node = d.node
    assert isinstance(node, ast.ClassDef)
    functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    init = next((f for f in functions if f.name == "__init__"), None)
    parts = [_escape(ast.get_docstring(node) or ""), _explained(d)]
    for n in node.body:
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and not n.target.id.startswith("_"):
            options = f":type: {ast.unparse(n.annotation)}\n" + (f":value: {ast.unparse(n.value)}\n" if n.value else "")
            parts.append(_entry("attribute", n.target.id, _escape(_comment(d, n.lineno)), options))
    for f in functions:
        if f.name.startswith("_") and f.name != "__call__":
            continue
        doc = _escape(ast.get_docstring(f) or "")
        if any(isinstance(x, ast.Name) and x.id == "property" for x in f.decorator_list):
            options = f":type: {ast.unparse(f.returns)}\n" if f.returns else ""
            parts.append(_entry("property", f.name, doc, options))
        else:
            ways = [x.id for x in f.decorator_list if isinstance(x, ast.Name)]
            ways += ["async"] * isinstance(f, ast.AsyncFunctionDef)
            options = "".join(f":{way}:\n" for way in ways if way in ("classmethod", "staticmethod", "async"))
            parts.append(_entry("method", f.name + _signature(f, True), doc, options))
    head = d.name + (_signature(init, True).removesuffix(" -> None") if init else "")
    bases = ", ".join(ast.unparse(b) for b in node.bases)
    members = [t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    members = [f"`{m}`" for m in members if not m.startswith("_")]
    parts[1:1] = [f"Base: `{bases}`" if bases else "", "Members: " + ", ".join(members) if members else ""]
    return _entry("class", head, "\n\n".join(filter(None, parts)), f":module: {m.name}\n", "``````")


def _explained(d: Definition) -> str:
    text = title(pages.notebook(d.page))
    return f'<p class="explained">explained in <a href="../{d.page}.html#cell-{d.cell}">{html.escape(text)}</a></p>'


def reference(m: Module) -> str:
    """The reference of one module, as MyST Markdown."""
    page = f"[{title(pages.notebook(m.page))}](../{m.page}.ipynb)"
    parts = [f"# {m.name}", f"```{{py:module}} {m.name}\n```", _escape(m.doc), f"The page: {page}."]
    for d in filter(in_reference, m.definitions):
        if isinstance(d.node, ast.ClassDef):
            parts.append(_class(m, d))
        elif isinstance(d.node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = f"{_escape(ast.get_docstring(d.node) or '')}\n\n{_explained(d)}"
            parts.append(_entry("function", d.name + _signature(d.node, False), body, f":module: {m.name}\n"))
    return "\n\n".join(parts) + "\n"


def source_page(m: Module) -> str:
    """A module's source as HTML: a link target at every line, a link to the page at every cell."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer
    shown = highlight(m.path.read_text(encoding="utf-8"), PythonLexer(), HtmlFormatter(lineanchors="L"))
    back = rf'<a class="cell" href="../\1.html#cell-\2">cell of {html.escape(title(pages.notebook(m.page)))}</a>'
    shown = re.sub(r'<span class="c1"># %% \S*?nbs/(\S+)\.ipynb #(\S+)</span>', back, shown)
    return (f'<h1>Source of {m.name}</h1><p><a href="../api/{m.short}.html">Reference</a> · '
            f'<a href="../{m.page}.html">{html.escape(title(pages.notebook(m.page)))}</a></p>{shown}')


# ---- the whole ----

def toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])


def write_pages() -> None:
    """Writes docs/_pages/ anew; what is the same keeps its time, so that Sphinx need not read it again."""
    want: dict[str, str] = {}
    order = [p.relative_to(pages.NBS).with_suffix("").as_posix() for p in route_order()]
    for stem in ["index", *order]:
        want[f"{stem}.ipynb"] = json.dumps(notebook(pages.notebook(stem)), ensure_ascii=False, sort_keys=True)
        want[f"_extra/notebooks/{stem}.ipynb"] = pages.notebook(stem).read_text(encoding="utf-8")
    for m in modules():
        want[f"api/{m.short}.md"] = reference(m)
    rows = "\n".join(f"| [{m.name}]({m.short}.md) | [{title(pages.notebook(m.page))}](../{m.page}.ipynb) | "
                     f"{_escape(m.doc.partition(chr(10))[0])} |" for m in modules())
    want["api/index.md"] = ("# Reference\n\nEvery public class and function, by module, in the order of the route.\n\n"
                            "| module | page | |\n| --- | --- | --- |\n" + rows + "\n\n"
                            + toctree("Modules", [m.short for m in modules()]) + "\n")
    want["contributing.md"] = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](\1)",
                                     (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    stops = [s for s in order if re.match(r"(0[1-9]|1[0-5])", Path(s).name)]
    after = [s for s in order if re.match(r"1[6-9]", Path(s).name)]
    beside = [s for s in order if s not in stops + after]
    trees = [toctree(c, n) for c, n in (("The route", stops), ("The whole", after), ("Beside the route", beside),
                                        ("Look up", ["api/index", "contributing"]))]
    index = json.loads(want["index.ipynb"])
    index["cells"].append(_markdown("\n\n".join(trees)) | {"id": "toctrees"})
    want["index.ipynb"] = json.dumps(index, ensure_ascii=False, sort_keys=True)
    for path in [p for p in PAGES.rglob("*") if p.is_file() and p.relative_to(PAGES).as_posix() not in want]:
        path.unlink()
    for name, text in want.items():
        pages.write(PAGES / name, text)


def build() -> int:
    """Builds the site; returns Sphinx's exit code."""
    from sphinx.cmd.build import main as sphinx
    write_pages()
    code: int = sphinx(["-W", "--keep-going", "-q", "-b", "html", "-c", str(DOCS), "-d", str(DOCS / "_build/cache"),
                        str(PAGES), str(SITE)])
    return code


def main() -> None:
    start = time.monotonic()
    if "--fresh" in sys.argv[1:]:
        for folder in (PAGES, DOCS / "_build"):
            shutil.rmtree(folder, ignore_errors=True)
    if code := build():
        sys.exit(code)
    print(f"  {time.monotonic() - start:.0f} s: {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
