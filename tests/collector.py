"""Collects every code cell of every notebook as one test.

A cell passes when it runs and prints what the notebook has stored. The cells before it run first. After a failing cell
the rest of its notebook is skipped. `--flags "long cuda"` also runs the cells and tests that carry these flags.
"""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import pytest
from _pytest.assertion.rewrite import rewrite_asserts
from pages import FLAGS, difference

ALL_FLAGS = {f: f"cells that say #| {f}, and tests with this mark" for f in FLAGS} | {
    "real": "tests on a real model, fetched by make test-real",
    "site": "tests of the site in a browser, run by make test-site"}


class OutputsDiffer(Exception):
    """A cell ran, and printed something else than its notebook has stored."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flags", default="", help=f"also run what carries these flags: {' '.join(ALL_FLAGS)}")
    parser.addoption("--outputs", choices=["compare", "ignore"], default="compare",
                     help="whether a cell must print what its notebook has stored")


def pytest_configure(config: pytest.Config) -> None:
    # a shell starts background jobs with SIGINT ignored, and Python then has no KeyboardInterrupt: some tests need one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cells.prepare()
    for flag, what in ALL_FLAGS.items():
        config.addinivalue_line("markers", f"{flag}: {what}")
    if unknown := set(config.getoption("--flags").split()) - set(ALL_FLAGS):
        raise pytest.UsageError(f"--flags: unknown {' '.join(sorted(unknown))}; there are {' '.join(ALL_FLAGS)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--flags").split()
    for item in items:
        if isinstance(item, CellItem):
            continue  # it looks itself, since a cell also runs on the way to a later one
        for flag in ALL_FLAGS:
            if item.get_closest_marker(flag) and flag not in wanted and not cells.HERE.get(flag, bool)():
                item.add_marker(pytest.mark.skip(reason=f"needs --flags {flag}"))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> NotebookFile | None:
    if file_path.suffix == ".ipynb" and file_path in cells.pages():
        return NotebookFile.from_parent(parent, path=file_path)
    return None


class NotebookFile(pytest.File):
    """One notebook; it holds the namespace that its cells share."""

    def collect(self) -> Iterator[CellItem]:
        self.page: cells.Page | None = None
        self.broken: CellItem | None = None
        self.items: list[CellItem] = []
        self.done, head = -1, "top"
        for i, c in enumerate(cells.read(self.path)["cells"]):
            if c["cell_type"] == "markdown" and (m := re.search(r"^#+\s+(.+)$", c["source"], re.M)):
                head = re.sub(r"\W+", "-", m[1]).strip("-")
            if c["cell_type"] == "code" and c["source"].strip():
                name = f"{i:02d}-{head}"
                self.items.append(CellItem.from_parent(self, name=name, idx=len(self.items), number=i, cell=c))
        return iter(self.items)

    def run_to(self, item: CellItem) -> list[cells.Output]:
        """Runs `item` and the cells before it that have not run; the outputs of `item`."""
        self.page = self.page or cells.Page(self.path)
        for it in self.items[self.done + 1:item.idx + 1]:
            self.done = it.idx
            if why := it.skip_reason():
                if it is item:
                    pytest.skip(why)
                continue
            try:
                it.execute(self.page)
            except BaseException:
                self.broken = it
                raise
        return self.page.outputs

    def release(self) -> None:
        """Lets go of the namespace: it may hold a model."""
        if self.page:
            self.page.close()
            self.page = None


class CellItem(pytest.Item):
    """One code cell."""

    def __init__(self, *, idx: int, number: int, cell: dict[str, Any], **kw: Any) -> None:
        super().__init__(**kw)
        self.idx, self.number, self.cell = idx, number, cell
        for flag in cells.directives(cell["source"]):
            if flag in ALL_FLAGS:
                self.add_marker(flag)

    def skip_reason(self) -> str | None:
        return cells.skip_reason(self.cell["source"], FLAGS, self.config.getoption("--flags").split())

    def execute(self, page: cells.Page) -> None:
        def rewrite(tree: ast.Module, source: bytes, name: str) -> None:
            """pytest's detail for the cell's own asserts; in functions they keep the texts that pages may print."""
            defs = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            bodies = [d.body for d in defs]
            for d in defs:
                d.body = [ast.Pass(lineno=d.lineno, col_offset=d.col_offset)]
            rewrite_asserts(tree, source, name, self.config)
            for d, body in zip(defs, bodies, strict=True):
                d.body = body

        try:
            page.run(self.number, self.cell["source"], rewrite)
        except BaseException:
            print(cells.as_text(page.outputs), end="")  # pytest shows it with the failure
            raise

    def runtest(self) -> None:
        notebook = self.parent
        assert isinstance(notebook, NotebookFile)
        if notebook.broken and notebook.broken is not self:
            pytest.skip(f"cell {notebook.broken.name} failed")
        now = cells.as_text(notebook.run_to(self))
        have = cells.as_text(self.cell["outputs"])
        if self.config.getoption("--outputs") == "compare" and have != now:
            raise OutputsDiffer(difference("", have, now, "stored", "printed now"))

    def teardown(self) -> None:
        notebook = self.parent
        if isinstance(notebook, NotebookFile) and (self.idx == len(notebook.items) - 1 or notebook.broken):
            notebook.release()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, OutputsDiffer):
            return f"{self.where()} printed something else than its notebook has stored.\n" \
                   f"If the new output is right: python tools/pages.py run {self.path.stem}\n\n{excinfo.value}"
        if isinstance(excinfo.value, SyntaxError):
            return super().repr_failure(excinfo)
        trace = list(excinfo.traceback)
        first = next((i for i, e in enumerate(trace) if ".ipynb#cell" in str(e.frame.code.raw.co_filename)), 0)
        excinfo.traceback = type(excinfo.traceback)(trace[first:])
        return excinfo.getrepr(style="long", abspath=False)

    def where(self) -> str:
        return f"{self.path.relative_to(cells.ROOT)} cell {self.number} (id {self.cell['id']})"

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.number, f"{self.path.relative_to(cells.ROOT)} cell {self.name}"
