"""The pages between text, notebook, module and stored output.

  text   [PAGE...]   notebook -> nbs_py/, to edit as plain Python (jupytext py:percent)
  build  [PAGE...]   text -> notebook (cell ids stay), export all pages, run, store the outputs
  export [PAGE...]   notebook -> module; without PAGE all of them, and walkvllm/_modidx.py
  run    [PAGE...]   run the notebooks and store their outputs
  check  [PAGE...]   change nothing; say where notebooks, modules and outputs disagree
  show   FILE        print a notebook as text (for git diff, see CONTRIBUTING.md)

A PAGE is a number, a name or a path: 06, blocks, 06_blocks, kernels/10, nbs/06_blocks.ipynb.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import difflib
import hashlib
import json
import linecache
import os
import re
import sys
import tempfile
import textwrap
import time
import tomllib
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cells
from cells import ROOT

_ini = configparser.ConfigParser()
_ini.read(ROOT / "settings.ini", encoding="utf-8")
NBS = ROOT / "nbs"
SETTINGS = _ini["DEFAULT"]
TEXT = ROOT / SETTINGS["text_path"]
KERNELS = SETTINGS["kernels_path"]
LIB = "walkvllm"
FLAGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["nbdev"]["tst_flags"].split()
NB_METADATA = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}


# ---- which pages ----

def stems() -> list[str]:
    """Every page as a path below nbs/ without its suffix, whether it exists as notebook, as text or both."""
    found = {p.relative_to(NBS).with_suffix("").as_posix() for p in cells.pages(NBS)}
    found |= {p.relative_to(TEXT).with_suffix("").as_posix() for p in TEXT.rglob("[!_.]*.py")}
    return sorted(found, key=lambda s: (s != "index", Path(s).name))


def choose(wanted: list[str], have: list[str]) -> list[str]:
    """The pages of `have` that `wanted` names, all of them where it is empty."""
    chosen = []
    for w in wanted or have:
        s = re.sub(r"^(nbs|nbs_py)/", "", re.sub(r"\.(ipynb|py)$", "", w.removeprefix("./")))
        hits = [h for h in have if s in (h, Path(h).name, re.sub(r"^\d+[a-z]?_", "", Path(h).name))]
        hits = hits or [h for h in have if h.startswith(f"{s}_")]
        hits = hits or [h for h in have if Path(h).name.startswith(f"{s}_")]
        if not hits:
            raise SystemExit(f"no page {w!r}; there are: {', '.join(have)}")
        chosen += [h for h in hits if h not in chosen]
    return chosen


def notebook(stem: str) -> Path:
    return NBS / f"{stem}.ipynb"


def write(path: Path, text: str) -> bool:
    """Writes `text` at once, and only where it differs; says whether it did."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    return True


# ---- notebooks ----

def canonical(nb: dict[str, Any]) -> str:
    """The notebook as its file should read: no execution counts, no stray metadata, sorted keys."""
    clean = []
    for c in nb["cells"]:
        d: dict[str, Any] = {"cell_type": c["cell_type"], "id": c["id"], "metadata": {},
                             "source": "".join(c["source"]).splitlines(True)}
        if c["cell_type"] == "code":
            outs = [o | {"execution_count": None} if o["output_type"] == "execute_result" else o for o in c["outputs"]]
            d |= {"execution_count": None, "outputs": cells.stored(outs)}
        clean.append(d)
    nb = {"cells": clean, "metadata": NB_METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def as_percent(path: Path) -> str:
    """The notebook's cells as py:percent text, without outputs and without a header."""
    import jupytext
    import nbformat
    nb = nbformat.read(path, as_version=4)
    filters = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "-all"}
    nb.metadata = nbformat.NotebookNode(jupytext=filters)
    text: str = jupytext.writes(nb, "py:percent", config=_jupytext_config())
    return re.sub(r"\A# ---\n(#.*\n)*?# ---\n\n*", "", text)


def take_page(stem: str, force: bool) -> str:
    """Writes the page's text and says so, but keeps a text that was edited after the page and says something else."""
    text, new = TEXT / f"{stem}.py", as_percent(notebook(stem))
    edited = text.exists() and text.stat().st_mtime > notebook(stem).stat().st_mtime
    if edited and not force and text.read_text(encoding="utf-8") != new:
        return "KEPT, edited after the page (build takes it, text --force drops it):"
    return "wrote" if write(text, new) else "same "


def _jupytext_config() -> Any:
    from jupytext.config import JupytextConfiguration
    return JupytextConfiguration(comment_magics=False, cell_metadata_filter="-all", notebook_metadata_filter="-all")


def from_text(stem: str, force: bool) -> dict[str, Any]:
    """The notebook that the page's text says, with the ids and outputs of the cells that were there before."""
    import jupytext
    import nbformat
    from jupytext.combine import combine_inputs_with_outputs
    text = TEXT / f"{stem}.py"
    nb = jupytext.reads(text.read_text(encoding="utf-8"), "py:percent", config=_jupytext_config())
    known: set[str] = set()
    if notebook(stem).exists():
        old = nbformat.read(notebook(stem), as_version=4)
        newer = notebook(stem).stat().st_mtime > text.stat().st_mtime
        same = [(c.cell_type, c.source) for c in nb.cells] == [(c.cell_type, c.source) for c in old.cells]
        if newer and not same and not force:
            raise SystemExit(f"nbs/{stem}.ipynb is newer than {TEXT.name}/{stem}.py and says something else.\n"
                             f"tools/pages.py text {stem} takes the notebook; build --force {stem} takes the text.")
        known = {c.id for c in old.cells}
        nb = combine_inputs_with_outputs(nb, old, "py:percent")
    taken = set(known)
    for c in nb.cells:
        if c.get("id") in known:
            continue
        salt = 0
        while (new := hashlib.sha1(f"{stem}\n{c.source}\n{salt}".encode()).hexdigest()[:8]) in taken:
            salt += 1
        c["id"] = new
        taken.add(new)
    return dict(nb)


# ---- export ----

def exported(chosen: list[str], index: bool = False) -> dict[str, str]:
    """Path (from the root) and text of each module that the pages export, and of _modidx.py if asked for.

    nbdev writes them into a temporary copy of the project, so nobody sees a half-written module.
    """
    from nbdev.export import nb_export
    from nbdev.maker import ModuleMaker

    made: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as tmp, contextlib.chdir(tmp):
        write(Path("pyproject.toml"), (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        Path(LIB).mkdir()
        for stem in chosen:
            nb = cells.read(notebook(stem))
            nb["cells"] = [c | ({"outputs": []} if c["cell_type"] == "code" else {}) for c in nb["cells"]]
            write(Path("nbs", f"{stem}.ipynb"), json.dumps(nb))

            def maker(stem: str = stem, **kw: Any) -> ModuleMaker:
                m = ModuleMaker(**{**kw, "is_new": True})  # a page's second module is new too
                name = m.fname.as_posix()
                if name in made:
                    raise SystemExit(f"{name} is exported by two pages: {made[name]} and {stem}")
                made[name] = stem
                return m

            kernel = re.match(r"kernels/\d+[a-z]?_(.+)", stem)
            where = {"lib_path": KERNELS} if kernel else {"lib_path": LIB}
            if kernel and not any("default_exp" in cells.directives(c["source"]) for c in nb["cells"]):
                where["name"] = kernel[1]  # for all that the page exports
            nb_export(Path("nbs", f"{stem}.ipynb"), mod_maker=maker, **where)
        texts = {name: _rewrap(Path(name).read_text(encoding="utf-8")) for name in made}
        if index:
            texts[f"{LIB}/_modidx.py"] = _modidx()
    return texts


def _rewrap(module: str) -> str:
    """The module with its __all__ in lines of at most 120 characters; nbdev forgets to count what stands before it."""
    def wrap(m: re.Match[str]) -> str:
        return textwrap.fill(" ".join(m[0].split()), 120, subsequent_indent=" " * 11, break_long_words=False)
    return re.sub(r"^__all__ = \[.*?\]$", wrap, module, count=1, flags=re.M | re.S)


def _modidx() -> str:
    """nbdev's index of symbols for the modules in the working directory."""
    from nbdev.doclinks import _build_modidx
    _build_modidx(dest=Path(LIB))
    return Path(LIB, "_modidx.py").read_text(encoding="utf-8")


def export(chosen: list[str], everything: bool) -> None:
    for name, text in exported(chosen, index=everything).items():
        print(f"  {'wrote' if write(ROOT / name, text) else 'same '} {name}")


# ---- run ----

def run(stem: str) -> list[list[cells.Output] | None]:
    """Runs a page; the outputs of each cell, None for what was not run. A failing cell ends the program, loudly."""
    page, start = cells.Page(notebook(stem)), time.monotonic()
    results: list[list[cells.Output] | None] = []
    nb = cells.read(notebook(stem))
    for i, c in enumerate(nb["cells"]):
        if c["cell_type"] != "code" or cells.skip_reason(c["source"], FLAGS, []):
            results.append(None)
            continue
        try:
            results.append(page.run(i, c["source"]) if c["source"].strip() else [])
        except BaseException as e:
            page.close()
            raise SystemExit(_failure(page, i, c, e)) from None
    page.close()
    print(f"  ran   nbs/{stem}.ipynb ({time.monotonic() - start:.1f} s)")
    return results


def _failure(page: cells.Page, number: int, cell: dict[str, Any], e: BaseException) -> str:
    """The message for a failing cell: which one, what it had printed, and the traceback from the cell inwards."""
    name = f"{page.name}#cell{number}"
    frames = traceback.extract_tb(e.__traceback__)
    first = next((i for i, f in enumerate(frames) if f.filename == name), None)
    trace = "".join(traceback.format_list(frames[first if first is not None else -1:]))
    line = frames[first].lineno if first is not None else getattr(e, "lineno", None)
    what = "".join(traceback.format_exception_only(type(e), e))
    if isinstance(e, AssertionError):
        what += f'For the values: .venv/bin/python -m pytest {page.name} -k "{number:02d}-"'
    source = linecache.getline(name, line).strip() if line else ""
    head = f"FAILED {page.name}, cell {number} (id {cell['id']})" + (f", line {line}: {source}" if line else "")
    shown = cells.as_text(page.outputs)
    return f"{head}\n{'printed before it failed:' + chr(10) + shown if shown else ''}{trace}{what}"


def store(stem: str) -> None:
    """Runs a page and stores its outputs in the notebook."""
    results = run(stem)
    nb = cells.read(notebook(stem))
    for c, outs in zip(nb["cells"], results, strict=True):
        if outs is not None:
            c["outputs"] = outs
    write(notebook(stem), canonical(nb))


# ---- check ----

def difference(name: str, have: str, want: str, have_name: str, want_name: str) -> str:
    """The first lines of a unified diff from `have` to `want`."""
    names = f"{name} ({have_name})", f"{name} ({want_name})"
    lines = list(difflib.unified_diff(have.splitlines(), want.splitlines(), names[0], names[1], lineterm="", n=2))
    return "\n".join(lines[:60] + [f"... and {len(lines) - 60} more lines"] * (len(lines) > 60))


def check_exported() -> list[str]:
    """Where the exported modules differ from what the pages say now."""
    want = exported([s for s in stems() if notebook(s).exists()], index=True)
    bad = []
    for name, text in want.items():
        have = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""
        if have != text:
            bad.append(difference(name, have, text, "the file", "what its page exports"))
    for path in [*(ROOT / LIB).glob("*.py"), *(ROOT / KERNELS).glob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if name not in want and "# AUTOGENERATED!" in path.read_text(encoding="utf-8"):
            bad.append(f"{name} says that it is exported, but no page exports it")
    return bad


def check_clean(stem: str) -> list[str]:
    """What is wrong with the notebook's file: form, ids, title and summary."""
    path = notebook(stem)
    text = path.read_text(encoding="utf-8")
    nb = cells.read(path)
    bad = []
    ids = [c.get("id") for c in nb["cells"]]
    if None in ids or len(set(ids)) != len(ids):
        bad.append(f"nbs/{stem}.ipynb: cell ids are missing or used twice")
    elif text != canonical(nb):
        bad.append(difference(f"nbs/{stem}.ipynb", text, canonical(nb), "the file", "as tools/pages.py run writes it"))
    first = nb["cells"][0]
    if first["cell_type"] != "markdown" or not re.match(r"# .+\n\n?> .+", first["source"]):
        bad.append(f"nbs/{stem}.ipynb: the first cell must hold `# Title`, then `> one summary line`")
    return bad


def check_outputs(stem: str) -> list[str]:
    """Where a page's stored outputs differ from what its cells print now."""
    nb = cells.read(notebook(stem))
    bad = []
    for i, (c, outs) in enumerate(zip(nb["cells"], run(stem), strict=True)):
        if outs is not None and (have := cells.as_text(c["outputs"])) != (now := cells.as_text(outs)):
            bad.append(difference(f"nbs/{stem}.ipynb cell {i} ({c['id']})", have, now, "stored", "printed now"))
    return bad


def check(chosen: list[str]) -> None:
    bad = check_exported()
    for stem in chosen:
        bad += check_clean(stem)
    for stem in chosen:
        bad += check_outputs(stem)
    print("\n\n".join(bad))
    print(f"{len(bad)} out of step" if bad else f"{len(chosen)} pages: modules, notebooks and outputs agree")
    sys.exit(bool(bad))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["text", "build", "export", "run", "check", "show"])
    parser.add_argument("page", nargs="*", metavar="PAGE")
    parser.add_argument("--no-run", action="store_true", help="build: keep the stored outputs, run nothing")
    parser.add_argument("--force", action="store_true", help="take the text (build) or page (text), though it is older")
    args = parser.parse_intermixed_args()
    if args.no_run and args.command != "build" or args.force and args.command not in ("build", "text"):
        parser.error("--no-run belongs to build, --force to build and text")
    cells.prepare()
    if args.command == "show":
        print(as_percent(Path(args.page[0])), end="")
        return
    if args.command == "build":
        chosen = choose(args.page, [s for s in stems() if (TEXT / f"{s}.py").exists()])
        for stem in chosen:
            changed = write(notebook(stem), canonical(from_text(stem, args.force)))
            print(f"  {'wrote' if changed else 'same '} nbs/{stem}.ipynb")
    else:
        chosen = choose(args.page, [s for s in stems() if notebook(s).exists()])
    if args.command == "text":
        for stem in chosen:
            print(f"  {take_page(stem, args.force)} {TEXT.name}/{stem}.py")
    if args.command == "build":  # the index of symbols needs all
        export([s for s in stems() if notebook(s).exists()], everything=True)
    if args.command == "export":
        export(chosen, everything=not args.page)
    if args.command == "run" or args.command == "build" and not args.no_run:
        for stem in chosen:
            store(stem)
    if args.command == "check":
        check(chosen)


if __name__ == "__main__":
    main()
