"""Writes walkvllm/data/sampling_params.json: the fields of vLLM's SamplingParams, read from its source with ast.

    python tools/oracle/sampling_fields.py .../vllm/sampling_params.py

Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parents[2] / "walkvllm" / "data" / "sampling_params.json"


def fields(source: str) -> list[dict[str, str]]:
    """Name, type and default of each field, in the order of the class; the default "" is none."""
    (cls,) = (n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "SamplingParams")
    return [
        {
            "name": n.target.id,
            "type": ast.unparse(n.annotation),
            "default": "" if n.value is None else ast.unparse(n.value),
        }
        for n in cls.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]


def main() -> None:
    found = fields(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = ",\n".join("  " + json.dumps(f) for f in found)
    TARGET.write_text(f'{{"vllm": "0.22.0", "fields": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{len(found)} fields written to {TARGET}")


if __name__ == "__main__":
    main()
