"""What must hold for the house as a whole: files agree with each other, imports point one way, sizes stay readable."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import cells
import pages
import pytest
from cells import ROOT

LIB, KERNELS = ROOT / pages.LIB, ROOT / pages.KERNELS
# Records that any module may import, and the checks of one of them.
VOCABULARY = {"config", "sampling_params", "sampling_checks", "messages"}
DOOR = {"kernels"}  # the loader of kernels/, on no page of the route
# How deep a module lies: the number of its page, except where a page tells of the parts before what drives them.
DEPTH = {
    "scheduler": 5.5,  # page 7, after page 6's blocks, which it spends
    "update": 5.7,  # page 14, the last third of a step: it frees page 6's blocks
    "model_runner": 7.5,  # page 12, after the batch, the model and the attention that it runs
    "cuda_graphs": 7.6,  # page 12b, beside it
    "kernels.paged_write": 11.5,  # page 10, behind the interface of page 11's attention
}
ONLOOKERS_FROM = 16  # pages from here on look at the engine: they may import anything, and no engine module them
ONLOOKERS = {"show", "schedule_trace", "pretend_card"}  # so do these
# Where the engine opens a door to an onlooker, inside a function, for whoever asks to look.
DOORS_TO_ONLOOKERS = {("llm", "walk"), ("llm", "trace"), ("engine_core_proc", "trace")}
FAST_TWINS = {"compiled_model", "fused_model"}  # page 09's decoder again, for a backend's kernels
ENGINE_LINES, MODULE_LINES, FUNCTION_LINES = 5400, 450, 60


def modules() -> list[Path]:
    return sorted(p for p in [*LIB.glob("*.py"), *KERNELS.glob("*.py")] if p.name not in ("__init__.py", "_modidx.py"))


def page_of(path: Path) -> int:
    """The number of the page that exports a module, as its header says; 0 for what is beside the route."""
    m = re.search(r"File to edit: \S*?/(\d+)[a-z]?_\w+\.ipynb\.", path.read_text(encoding="utf-8"))
    return int(m[1]) if m else 0


def is_engine(path: Path) -> bool:
    return page_of(path) < ONLOOKERS_FROM and name_of(path) not in ONLOOKERS


def name_of(path: Path) -> str:
    return f"kernels.{path.stem}" if path.parent == KERNELS else path.stem


def tracked() -> list[Path]:
    """The files that git tracks or would: not those it ignores."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    return [ROOT / line for line in files.splitlines() if (ROOT / line).is_file()]


def call(*command: str) -> None:
    """Runs a tool of this environment in the root; its report is the failure."""
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)


# ---- files agree ----

def test_modules_equal_cells() -> None:
    if bad := pages.check_exported():
        pytest.fail("\n\n".join([*bad, "If the pages are right: python tools/pages.py export"]), pytrace=False)


@pytest.mark.parametrize("stem", [s for s in pages.stems() if pages.notebook(s).exists()])
def test_notebook_is_clean(stem: str) -> None:
    if bad := pages.check_clean(stem):
        pytest.fail("\n\n".join(bad), pytrace=False)


def test_text_of_pages_is_not_tracked() -> None:
    assert not [p for p in tracked() if pages.TEXT in p.parents], "the notebooks are the source"


def test_kernels_is_no_package() -> None:
    """A package named kernels in the working directory breaks `import transformers`."""
    assert not (KERNELS / "__init__.py").exists()
    from walkvllm import kernels
    assert [Path(p) for p in kernels.__path__] == [KERNELS]
    for path in KERNELS.glob("*.py"):
        assert Path(importlib.import_module(f"walkvllm.kernels.{path.stem}").__file__ or "") == path


def test_public_names() -> None:
    import walkvllm
    for name in walkvllm.__all__:
        assert getattr(walkvllm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        walkvllm.LLMs  # noqa: B018


def test_no_path_of_one_machine() -> None:
    """No file names a folder that is there on one machine only."""
    homes = re.compile(r"(?<![\w.~/])/(home|Users|root|work|mnt|opt)/\w")
    bad = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data or path == Path(__file__):
            continue
        text = data.decode(errors="replace")
        bad += [f"{path.relative_to(ROOT)}: {text[m.start():m.start() + 60]!r}" for m in homes.finditer(text)]
    assert not bad, "\n".join(bad)


def test_one_vllm_version() -> None:
    """Code and tools speak of the vLLM version that settings.ini names, and of no other."""
    bad = []
    for path in tracked():
        if path.suffix == ".py" and path != Path(__file__):
            found = re.findall(r"(?i)\bvllm(?:-cpu)?(?: |==)v?(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8"))
            bad += [f"{path.relative_to(ROOT)}: {v}" for v in found if v != pages.SETTINGS["vllm_version"]]
    assert not bad


def test_ci_runs_what_the_readme_says() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text() and "make test" in (ROOT / "README.md").read_text()


# ---- imports point one way ----

def imports(tree: ast.AST) -> set[str]:
    """The project's modules that a module imports at run time, also inside functions: llm, kernels.paged_write, ..."""
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    typing_only = {id(n) for guard in guards for child in guard.body for n in ast.walk(child)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            full = f"{pages.LIB}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            found |= {f"{full}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {f.removeprefix(f"{pages.LIB}.") for f in found if f.startswith(f"{pages.LIB}.")}


def resolve(dotted: str, known: Container[str]) -> str | None:
    """The module that an imported name belongs to: kernels.paged_write.write -> kernels.paged_write."""
    while dotted and dotted not in known:
        dotted = dotted.rpartition(".")[0]
    return dotted or None


def test_imports_point_down_the_route() -> None:
    """A module imports only what lies deeper on the route (or on its own page), and the shared vocabulary."""
    depth = {name_of(p): DEPTH.get(name_of(p), page_of(p)) for p in modules()}
    engine = {name_of(p) for p in modules() if is_engine(p)}
    bad = []
    for path in filter(is_engine, modules()):
        name = name_of(path)
        wanted = {resolve(i, depth) for i in imports(ast.parse(path.read_text(encoding="utf-8")))} - {None, name}
        for target in sorted(filter(None, wanted)):
            if (name, target) in DOORS_TO_ONLOOKERS:
                continue
            if target not in engine or depth[target] < depth[name] and target not in VOCABULARY | DOOR:
                bad.append(f"{name} (depth {depth[name]}) imports {target} (depth {depth[target]})")
    assert not bad, "\n".join(bad)


def test_transformers_is_for_tests_only() -> None:
    for path in modules():
        assert not re.search(r"^\s*(import|from) transformers\b", path.read_text(encoding="utf-8"), re.M), path


# ---- sizes and signatures ----

def code_lines(path: Path) -> int:
    """Lines of an exported module without blank ones and without what nbdev adds."""
    text = re.sub(r"^__all__ = \[.*?\]$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return sum(1 for line in text.splitlines() if line.strip() and not re.match(r"# (%%|AUTOGENERATED)", line))


def length(f: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of code of a function, without its docstring and comments."""
    return len({n.lineno for n in ast.walk(f) if hasattr(n, "lineno")}) - (ast.get_docstring(f) is not None)


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_sizes() -> None:
    lines = {name_of(p): code_lines(p) for p in modules()}
    engine = sum(lines[name_of(p)] for p in LIB.glob("*.py")
                 if name_of(p) in lines.keys() - FAST_TWINS and is_engine(p))
    print(f"engine: {engine} lines", *(f"{n:5} {name}" for name, n in lines.items()), sep="\n")
    assert engine <= ENGINE_LINES
    assert not [f"{name}: {n} lines" for name, n in lines.items() if n > MODULE_LINES]
    long = [f"{name_of(p)}.{f.name}: {n} lines" for p in modules() for f in functions(p)
            if (n := length(f)) > FUNCTION_LINES]
    assert not long


def test_kernel_modules_have_types() -> None:
    """Every function in kernels/ has a full signature; what Triton compiles is exempt."""
    bad = []
    for path in KERNELS.glob("*.py"):
        for f in functions(path):
            args = [a for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs] if a.arg not in ("self", "cls")]
            jit = any("jit" in ast.unparse(d) for d in f.decorator_list)
            if not jit and (f.returns is None or any(a.annotation is None for a in args)):
                bad.append(f"{path.stem}.{f.name}")
    assert not bad


def test_ruff() -> None:
    call("ruff", "check", "--quiet", ".")


def test_mypy() -> None:
    call("mypy")


# ---- the tools do what they say ----

def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    """The set-up script runs on an old Python far enough to say that it is old."""
    ast.parse((ROOT / "tools/setup.py").read_text(encoding="utf-8"), feature_version=(3, 7))
    fake = "import sys, runpy; sys.version_info = (3, 8, 0, 'final', 0); sys.argv = ['setup.py', 'run'];" \
           f"runpy.run_path({str(ROOT / 'tools/setup.py')!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", fake], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert run.returncode == 1 and "needs Python 3.11 or newer" in run.stderr


def test_cell_runner(tmp_path: Path) -> None:
    """The runner shares one namespace, keeps the order of what is shown, and tells addresses apart from output."""
    page = cells.Page(tmp_path / "x.ipynb")
    first = "from __future__ import annotations\nimport dataclasses\nprint('a'); display(1); print('b')\n2"
    assert page.run(0, first) == [
        {"name": "stdout", "output_type": "stream", "text": "a\n"},
        {"data": {"text/plain": "1"}, "metadata": {}, "output_type": "display_data"},
        {"name": "stdout", "output_type": "stream", "text": "b\n"},
        {"data": {"text/plain": "2"}, "metadata": {}, "output_type": "execute_result", "execution_count": None}]
    assert page.run(1, "@dataclasses.dataclass\nclass A:\n    x: Later\nclass Later: pass\nA(1).x;") == []
    assert page.run(2, "import asyncio\nt = asyncio.ensure_future(asyncio.sleep(0, 7))\nawait asyncio.sleep(0)") == []
    assert page.run(3, "await t")[0]["data"] == {"text/plain": "7"}
    assert cells.as_text(page.run(4, "print(Later())")) == "[stdout]\n<__main__.Later object>\n"
    page.close()


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_makefile_names_only_what_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    assert not [t for t in re.findall(r"tools/\w+\.py|tests/\w+\.py", text) if not (ROOT / t).exists()]


def test_every_picture_is_displayed() -> None:
    """A notebook shows what the last expression of a cell returns: a picture or a table in front of it is lost."""
    lost = []
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            body = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
            lost += [f"{path.name}: {ast.unparse(n)}" for n in body[:-1] if isinstance(n, ast.Expr)
                     and re.match(r"(show_\w+|route|in_vllm)\(", ast.unparse(n))]  # fmt: skip
    assert not lost
