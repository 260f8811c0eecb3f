"""README.md says what the index page says.

  python tools/readme.py          write README.md from nbs/index.ipynb
  python tools/readme.py --check  change nothing; say what is wrong

The README is the page down to the heading HEADING: its words, its code and what the code printed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cells
from cells import ROOT

PAGE, README = ROOT / "nbs/index.ipynb", ROOT / "README.md"
HEADING = "## The whole walk in five cells"
NOTE = "<!-- Written by tools/readme.py from nbs/index.ipynb; edit the page. -->\n"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")


def render() -> str:
    """The README as the index page wants it."""
    parts = [NOTE]
    for cell in cells.read(PAGE)["cells"]:
        source = "".join(cell["source"])
        if HEADING in source:
            break
        if cell["cell_type"] == "markdown":
            parts.append(_LINK.sub(_from_root, source) + "\n")
        elif not cells.directives(source).keys() & {"hide", "hide_input"}:
            parts.append(f"```python\n{source}\n```\n")
            parts += [f"```text\n{text.rstrip()}\n```\n" for text in map(_printed, cell["outputs"]) if text.strip()]
    return "\n".join(parts)


def _from_root(link: re.Match[str]) -> str:
    """A link of the page as a link of the README."""
    return link[1].removeprefix("../") if link[1].startswith("../") else f"nbs/{link[1]}"


def _printed(output: dict[str, Any]) -> str:
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))


def check() -> list[str]:
    """What is wrong: the README is old, a link of the page leads nowhere, or a page is not in the page's table."""
    bad = []
    if not README.exists() or README.read_text(encoding="utf-8") != render():
        bad.append("README.md is not what nbs/index.ipynb says; run: python tools/readme.py")
    words = "\n".join("".join(c["source"]) for c in cells.read(PAGE)["cells"] if c["cell_type"] == "markdown")
    targets = {(PAGE.parent / link).resolve() for link in _LINK.findall(words)}
    bad += [f"nbs/index.ipynb: {t.relative_to(ROOT)} is not there" for t in sorted(targets) if not t.exists()]
    missing = {p.resolve() for p in cells.pages(PAGE.parent)} - targets - {PAGE}
    return bad + [f"nbs/index.ipynb: no link to {p.relative_to(ROOT)}" for p in sorted(missing)]


def main() -> None:
    if "--check" not in sys.argv[1:]:
        README.write_text(render(), encoding="utf-8")
    if bad := check():
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
