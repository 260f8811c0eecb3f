"""The data of the map that is read from vLLM's sources, written again:

  python tools/vllm_data.py signatures PATH   the parameters of every cited function of 0.22.0
  python tools/vllm_data.py drift OLD NEW VERSION   what has become of 0.22.0's names in another version

PATH, OLD and NEW are directories, wheels or versions, as for `walkvllm map --vllm`.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from walkvllm.show import vllm_symbols
from walkvllm.vllm_map import check_map, counts, open_sources, signature, symbols

DATA = ROOT / "walkvllm/data"


def signatures(old: str) -> None:
    """Writes signatures.json; stops if a cited name is not in the sources."""
    found = {}
    with open_sources(old) as sources:
        for row in symbols():
            node = sources.find(row["module"], row["symbol"])
            if node is None:
                sys.exit(f"{row['module']}:{row['symbol']} is not in {sources.name}")
            if (names := signature(node)) is not None:
                found[f"{row['module']}:{row['symbol']}"] = names
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(found.items()))
    (DATA / "signatures.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def body(node: ast.AST | None) -> str:
    """The code of a definition without docstrings, comments and positions."""
    if node is None:
        return ""
    tree = ast.parse(ast.unparse(node))
    for n in ast.walk(tree):
        if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(n) is not None:
            n.body = n.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def drift(old: str, new: str, version: str) -> None:
    """Writes drift.json: the findings that are not `same`, and the sums."""
    with open_sources(old) as a, open_sources(new) as b:
        rows = vllm_symbols()  # the map of the route; not what only a sentence mentions
        findings = check_map(b, rows)
        pairs = [(a.find(r["module"], r["symbol"]), b.find(r["module"], r["symbol"])) for r in rows]
        same_line = sum(x is not None and y is not None and x.lineno == y.lineno  # type: ignore[attr-defined]
                        for x, y in pairs)
        same_body = sum(y is not None and body(x) == body(y) for x, y in pairs)
        edges = sum(len(r.get("calls", ())) for r in rows)
        sums = {"names": len(findings), "edges": edges} | counts(findings)
        told = {"from": "0.22.0", "to": version, "date": datetime.date.today().isoformat(),
                "read": b.name.split("/")[-1], "counts": sums | {"same line": same_line, "same body": same_body}}
    lines = ",\n".join("  " + json.dumps(asdict(f)) for f in findings if not f.same)
    head = json.dumps(told, indent=1)[:-2]
    (DATA / "drift.json").write_text(f'{head},\n "findings": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    match sys.argv[1:]:
        case ["signatures", old]:
            signatures(old)
        case ["drift", old, new, version]:
            drift(old, new, version)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
