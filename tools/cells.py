"""Runs a notebook's code cells in one namespace and returns what they print.

The page tool (tools/pages.py) and the tests (tests/collector.py) share it, so a stored output and a test see the
same run. It needs only the standard library; IPython's pretty printer is used where it is installed.
"""

from __future__ import annotations
import __future__

import ast
import asyncio
import builtins
import inspect
import io
import json
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Output = dict[str, Any]
Rewrite = Callable[[ast.Module, bytes, str], None]

_DIRECTIVE = re.compile(r"^\s*#\s*\|\s*([\w-]+)\s*(?::\s*|\s+|$)(.*)$")
_ADDRESS = re.compile(r"(<.*?)( at 0x[0-9a-fA-F]+)(>)")  # as nbdev-clean does: an address is never the same twice
_TORCH_SEED = 67280421310721  # torch's generator in a new process
_FUTURES = {getattr(__future__, n).compiler_flag for n in __future__.all_feature_names}

try:
    from IPython.lib.pretty import pretty as _pretty
except ImportError:
    _pretty = repr

PLAIN_REPR = _pretty is repr  # then text/plain may differ in its line breaks from what is stored


def prepare() -> None:
    """Sets the environment that cells run in: one torch thread, Triton's interpreter where there is no CUDA.

    The engine core stays in the page's own process, where it can be looked at, unless a cell says otherwise.

    Call it before torch or triton are imported.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not has_cuda():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def has_cuda() -> bool:
    """True where torch finds a CUDA device; without the NVIDIA driver it answers without importing torch."""
    if not Path("/proc/driver/nvidia").exists() and "torch" not in sys.modules:
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def has_compiler() -> bool:
    """Whether the CPU kernels of page 11c can be built."""
    from walkvllm.kernels.cpu import library
    return library() is not None


def has_interpreter() -> bool:
    """Whether Triton's kernels run on the CPU here."""
    from walkvllm.attention import interpreting
    return interpreting()


# flags of what a machine may have: if it has it, they are wanted
HERE = {"cuda": has_cuda, "compiler": has_compiler, "interpreter": has_interpreter}


def pages(folder: Path | None = None) -> list[Path]:
    """The notebooks below `folder` (default nbs/) in page order, without hidden files and checkpoints."""
    folder = folder or ROOT / "nbs"
    found = [p for p in folder.rglob("*.ipynb") if not any(q[0] in "._" for q in p.relative_to(folder).parts)]
    return sorted(found, key=lambda p: (p.stem != "index", p.name))


def read(path: Path) -> dict[str, Any]:
    """The notebook as a dict whose sources are strings."""
    nb: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        cell["source"] = "".join(cell["source"])
    return nb


def directives(source: str) -> dict[str, str]:
    """nbdev's leading `#| name: value` lines of a cell."""
    found: dict[str, str] = {}
    for line in filter(str.strip, source.splitlines()):
        if not (m := _DIRECTIVE.match(line)):
            break
        found[m[1]] = m[2].strip()
    return found


def skip_reason(source: str, flags: list[str], wanted: list[str]) -> str | None:
    """Why a cell is not run: `#| eval: false`, or one of `flags` that is not `wanted` (and not here)."""
    dirs = directives(source)
    if dirs.get("eval") == "false":
        return "#| eval: false"
    for flag in flags:
        if flag in dirs and flag not in wanted and not HERE.get(flag, bool)():
            return f"#| {flag}"
    return None


class Page:
    """One notebook being run: a namespace that its cells share, and what stands around them while they run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = os.path.relpath(path, ROOT)
        self.module = types.ModuleType("__main__")  # dataclasses and msgspec look names up in sys.modules["__main__"]
        self.module.__dict__.update(__builtins__=builtins, display=self._display)
        self.loop = asyncio.new_event_loop()  # as in Jupyter, a cell runs inside a loop that goes on between cells
        self.flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self.outputs: list[Output] = []
        if torch := sys.modules.get("torch"):
            torch.manual_seed(_TORCH_SEED)

    def run(self, number: int, source: str, rewrite: Rewrite | None = None) -> list[Output]:
        """Runs one cell and returns its outputs; `rewrite` may change its tree first (pytest's assert rewriting).

        The cell's exception passes through; what the cell had shown until then is in `self.outputs`.
        """
        name = f"{self.name}#cell{number}"
        self.outputs = []
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # tracebacks, inspect, triton.jit
        with self._surroundings():
            self.loop.run_until_complete(self._run(source, name, rewrite))
        return self.outputs

    async def _run(self, source: str, name: str, rewrite: Rewrite | None) -> None:
        tree = compile(source, name, "exec", ast.PyCF_ONLY_AST | self.flags, dont_inherit=True)
        if rewrite:
            rewrite(tree, source.encode(), name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        await self._eval(tree, name, "exec")
        if last is not None:
            value = await self._eval(ast.Expression(last.value), name, "eval")
            if value is not None and not source.rstrip().endswith(";"):
                self.outputs.append(_bundle(value, "execute_result"))

    def close(self) -> None:
        """Closes the event loop that the page ran in."""
        self.loop.close()

    async def _eval(self, node: ast.Module | ast.Expression, name: str, mode: str) -> Any:
        code = compile(node, name, mode, self.flags, dont_inherit=True)
        self.flags |= sum(f for f in _FUTURES if code.co_flags & f)  # `from __future__` holds for the cells that follow
        result = eval(code, self.module.__dict__)
        if inspect.iscoroutine(result) and code.co_flags & inspect.CO_COROUTINE:
            result = await result
        return result

    def _display(self, *values: Any, **_: Any) -> None:
        self.outputs += [_bundle(v, "display_data") for v in values]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """The page's folder as working directory, the root on sys.path, the page as `__main__`, stdout caught."""
        cwd, path, out, main = os.getcwd(), list(sys.path), sys.stdout, sys.modules["__main__"]
        os.chdir(self.path.parent)
        sys.path.insert(0, str(ROOT))
        sys.stdout, sys.modules["__main__"] = _Stdout(self), self.module
        try:
            yield
        finally:
            os.chdir(cwd)
            sys.path[:], sys.stdout, sys.modules["__main__"] = path, out, main


class _Stdout(io.TextIOBase):
    """Collects what a cell prints in the page's outputs, in order with what it displays."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        outputs = self.page.outputs
        if not outputs or outputs[-1]["output_type"] != "stream":
            outputs.append({"name": "stdout", "output_type": "stream", "text": ""})
        outputs[-1]["text"] = _ADDRESS.sub(r"\1\3", outputs[-1]["text"] + text)
        return len(text)


def _bundle(value: Any, kind: str) -> Output:
    """The notebook output that shows `value`: plain text, and HTML or Markdown where the object offers it."""
    data = {"text/plain": _pretty(value)}
    for mime, method in (("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_")):
        shown = getattr(value, method, None) if not isinstance(value, type) else None
        if callable(shown) and (text := shown()) is not None:
            data[mime] = text
    data = {mime: _ADDRESS.sub(r"\1\3", text) for mime, text in data.items()}
    output: Output = {"data": data, "metadata": {}, "output_type": kind}
    return output | {"execution_count": None} if kind == "execute_result" else output


def stored(outputs: list[Output]) -> list[Output]:
    """`outputs` as a notebook file holds them: texts as lists of lines."""

    def lines(text: Any) -> Any:
        return text.splitlines(True) if isinstance(text, str) else text

    return [{k: lines(v) if k == "text" else {m: lines(t) for m, t in v.items()} if k == "data" else v
             for k, v in out.items()} for out in outputs]


def as_text(outputs: list[Output]) -> str:
    """`outputs` as text for comparing and for a terminal, stored or fresh."""
    parts = []
    for out in outputs:
        if out["output_type"] == "stream":
            texts = {out["name"]: out["text"]}
        elif out["output_type"] == "error":
            texts = {"error": out["evalue"]}
        else:
            texts = {f"{out['output_type']} {mime}": text for mime, text in sorted(out["data"].items())
                     if not (PLAIN_REPR and mime == "text/plain")}
        parts += [f"[{name}]\n" + "".join(text).replace("><", ">\n<") for name, text in texts.items()]
    return "\n".join(p.rstrip("\n") for p in parts) + "\n" if parts else ""


if __name__ == "__main__":  # for `env $(python tools/cells.py) jupyter lab`
    before = dict(os.environ)
    prepare()
    print(*(f"{k}={v}" for k, v in os.environ.items() if before.get(k) != v))
