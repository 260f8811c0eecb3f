"""Records the running example once, for the pages that play it: walkvllm/data/example_run.jsonl."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from walkvllm.recording import record_walk
from walkvllm.replay import check
from walkvllm.show import example


def main() -> None:
    path = ROOT / "walkvllm" / "data" / "example_run.jsonl"
    with example.llm(multiprocess=False) as llm:
        llm.generate(example.prompts, example.params, use_tqdm=False)  # the first run is slower than the others
    with example.llm(multiprocess=False) as llm:  # a new pool: its blocks are in order, and remember nothing
        run = record_walk(llm, example.prompts, example.params, example.names)
    check(run)
    run.save(path)
    print(f"{path.relative_to(ROOT)}: {run}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
