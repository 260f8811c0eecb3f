"""What the pages say about vLLM is in the project's data, and the data can be checked (page 18)."""

from __future__ import annotations

import builtins
import re

import cells
import pages
import pytest
from cells import ROOT

from walkvllm.show import vllm_symbols
from walkvllm.vllm_map import decision_ledger, left_out, symbols

# In prose, what looks like a class, a method of a class, or a file of vLLM.
NAME = re.compile(r"`((?:[\w/]+/)?\w+\.py|[A-Z]\w*[a-z]\w*(?:\.\w+)*)(?:\(\))?`")
STEMS = [p.relative_to(pages.NBS).with_suffix("").as_posix() for p in cells.pages()]


def ours() -> set[str]:
    """Names that the project itself defines or that are Python's; a page may speak of both."""
    found = set(dir(builtins))
    for path in [*(ROOT / pages.LIB).glob("*.py"), *(ROOT / pages.KERNELS).glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        pairs = re.findall(r"^\s*(?:class|def|async def) (\w+)|^(\w+)(?::.*)? = ", text, re.M)
        found |= {name for pair in pairs for name in pair}
        found.add(path.name)
    return found


def cited(stem: str) -> set[str]:
    """The names that a page's section "In vLLM 0.22.0" writes as code in its sentences."""
    found, inside = set(), False
    for cell in cells.read(pages.notebook(stem))["cells"]:
        if cell["cell_type"] != "markdown":
            continue
        for part in re.split(r"^(?=#+ )", cell["source"], flags=re.M):
            if part.startswith("#"):
                inside = "In vLLM" in part.splitlines()[0] and not part.startswith("# ")
            if inside:
                found |= set(NAME.findall(part))
    return found


@pytest.mark.parametrize("stem", STEMS)
def test_cited_names_are_in_the_data(stem: str) -> None:
    """A name of vLLM that a page cites is a row of the map, or stands in data/cited.jsonl: so it can be checked."""
    known = ours()
    for row in symbols():
        known |= {row["module"], row["module"].removeprefix("vllm/"), row["module"].rsplit("/", 1)[-1], row["symbol"]}
        known |= set(row["symbol"].split("."))
        known |= {c for call in row.get("calls", ()) for c in (call, call.split(".")[-1])}
    bad = [n for n in cited(stem) if n not in known and n.split(".")[-1] not in known]
    assert not bad, f"nbs/{stem}.ipynb cites {', '.join(sorted(bad))}; add them to walkvllm/data/cited.jsonl"


def test_rows_are_whole() -> None:
    numbers = {re.sub(r"_.*", "", s.rsplit("/", 1)[-1]) for s in STEMS}
    for row in vllm_symbols():
        assert row["page"] in numbers and row["module"].startswith("vllm/") and row["idea"], row
    for row in left_out():
        assert row["what"] and row["says"].endswith("."), row
    for entry in decision_ledger():
        assert all(entry[k] for k in ("what", "there", "here", "why")), entry


def test_every_stop_shows_its_rows() -> None:
    """A page with rows shows them, and not another page's."""
    for number in {r["page"] for r in vllm_symbols()}:
        stem = next(s for s in STEMS if s.rsplit("/", 1)[-1].startswith(f"{number}_"))
        sources = [c["source"] for c in cells.read(pages.notebook(stem))["cells"] if c["cell_type"] == "code"]
        assert any(f'in_vllm("{number}")' in s or "vllm_symbols()" in s for s in sources), stem
