"""Makes .venv, or repairs it: python3 tools/setup.py run|test|real|lab|site

run   what `walkvllm` needs
test  run, and what the tests and the page tools need
real  test, and what reads the real model's file
lab   test, and JupyterLab
site  test, and what builds the website and drives a browser

It needs only Python's standard library. When nothing is to be done it takes a fraction of a second. pip is used as it
is set up on this machine; its output goes to .venv/setup.log.
"""

# This first part also runs on an old Python, to say that it is old.
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "Scripts" if os.name == "nt" else "bin", "python")
LOG = os.path.join(VENV, "setup.log")
LAYERS = {"run": ["run"], "test": ["run", "test"], "real": ["run", "test", "real"], "lab": ["run", "test", "lab"],
          "site": ["run", "test", "site"]}
EXTRAS = {"run": "", "test": "[triton,dev]", "real": "[real]", "lab": "[lab]", "site": "[site]"}
BUILD = ["setuptools>=77"]  # builds walkvllm in .venv itself, which saves pip making an environment for it each time
# What must be importable when a layer is complete.
MODULES = {
    "run": "torch numpy safetensors tokenizers msgspec zmq jinja2 tqdm walkvllm",
    "test": "nbdev jupytext nbformat IPython pytest hypothesis transformers pandas mypy ruff",
    "real": "gguf accelerate",
    "lab": "jupyterlab ipykernel ipywidgets anywidget",
    "site": "sphinx myst_nb furo selenium",
}


def stop(message):
    """Ends the program with a message for a person."""
    sys.exit("\n" + message + "\n")


def find_python():
    """The path of a Python that is new enough: this one, or another on PATH."""
    if sys.version_info[:2] >= OLDEST:
        return sys.executable
    for minor in range(19, OLDEST[1] - 1, -1):
        path = shutil.which("python3." + str(minor))
        if path and subprocess.call([path, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return path
    return stop(f"walkvllm needs Python {OLDEST[0]}.{OLDEST[1]} or newer. {sys.executable} is Python "
                f"{platform.python_version()}, and no newer one is on PATH.\n"
                "Install one, then: make PYTHON=/path/to/python3.x ...")


def run(what, command, quiet_failure=False):
    """Runs a command and shows what is happening, with the seconds; its output goes to the log. Says if it worked."""
    tty, start, shown = sys.stdout.isatty(), time.time(), -1.0
    with open(LOG, "a") as log:
        log.write("\n$ " + " ".join(command) + "\n")
        log.flush()
        where = log.tell()
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            while job.poll() is None:
                seconds = time.time() - start
                if tty or seconds - shown >= 15 or shown < 0:
                    text = f"  {what} ..." + (f" {seconds:.0f} s" if seconds > 1 else "")
                    sys.stdout.write("\r" + text if tty else text + "\n")
                    sys.stdout.flush()
                    shown = seconds
                time.sleep(0.2)
        except BaseException:
            job.terminate()
            job.wait()
            raise
    done = "done" if job.returncode == 0 else "not to be had" if quiet_failure else "FAILED"
    print(("\r" if tty else "") + f"  {what} ... {time.time() - start:.0f} s, {done}")
    if job.returncode and not quiet_failure:
        with open(LOG, errors="replace") as log:
            log.seek(where)
            print("    " + "    ".join(log.readlines()[-25:]))
    return job.returncode == 0


def works(code):
    """Whether .venv's Python runs the code."""
    try:
        return subprocess.call([PYTHON, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, cwd=VENV) == 0
    except OSError:
        return False


def has_nvidia():
    """Whether this machine has an NVIDIA driver, so that a CUDA build of torch is of use."""
    return os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi") is not None


def wait_for_others():
    """Returns when no other set-up works in this folder; the lock goes when this program ends."""
    try:
        import fcntl
    except ImportError:
        return
    lock = os.open(os.path.abspath(__file__), os.O_RDONLY)  # held until the program ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("  another set-up is at work in this folder; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)


# ---- the environment ----

def make_venv(python):
    """Makes .venv anew, unless it is whole and belongs to this folder."""
    config = os.path.join(VENV, "walkvllm-root")
    if read(config) == ROOT and works("import pip"):
        return
    if os.path.exists(VENV):
        print("  .venv is broken, half made or was moved: making it anew")
        shutil.rmtree(VENV)
    if subprocess.call([python, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL):
        stop(f"{python} cannot make virtual environments: its module venv or ensurepip is missing.\n"
             "On Debian and Ubuntu: apt-get install python3-venv")
    os.makedirs(VENV)
    if not run("making .venv with " + python, [python, "-m", "venv", "--clear", VENV]):
        stop("python -m venv failed, see above.")
    with open(config, "w") as f:
        f.write(ROOT)


def site_packages():
    """The folder that pip installs into."""
    unix = glob.glob(os.path.join(VENV, "lib", "python*", "site-packages"))
    return unix[0] if unix else os.path.join(VENV, "Lib", "site-packages")


def read(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except OSError:
        return ""


def key(layer):
    """What a layer is made from: dependencies, build settings, constraints."""
    import hashlib
    import tomllib
    project = tomllib.loads(read(os.path.join(ROOT, "pyproject.toml")))
    parts = [layer, read(os.path.join(ROOT, "constraints.txt")), project["build-system"], project["project"],
             project["tool"]["setuptools"]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stamp(layer):
    """The file that is written when a layer is complete: its key, and what lay in site-packages then."""
    return os.path.join(VENV, "stamp-" + layer)


def lost(layer):
    """What lay in site-packages when the layer was complete and is gone; None if the layer is not complete."""
    try:
        made = json.loads(read(stamp(layer)))
    except ValueError:
        return None
    return sorted(set(made["names"]) - set(os.listdir(site_packages()))) if made["key"] == key(layer) else None


def owners(names):
    """The installed distributions that these entries of site-packages belong to, as name==version."""
    found = set()
    for info in glob.glob(os.path.join(site_packages(), "*.dist-info")):
        tops = {line.split("/")[0].split(",")[0] for line in read(os.path.join(info, "RECORD")).splitlines()}
        if tops & set(names):
            found.add("==".join(os.path.basename(info)[:-len(".dist-info")].split("-")[:2]))
    return sorted(found)


def drop_half_installed():
    """Removes what an interrupted pip left: a distribution without its list of files counts as installed for pip."""
    for info in glob.glob(os.path.join(site_packages(), "*.dist-info")):
        if not os.path.exists(os.path.join(info, "RECORD")):
            shutil.rmtree(info)


def pip(what, *args, constraints="constraints.txt", quiet_failure=False):
    return run(what, [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input",
                      "-c", constraints, *args], quiet_failure)


def constraints_for(layer):
    """constraints.txt, without triton where torch is a CUDA build, which brings its own."""
    if cuda_build() is None:
        return "constraints.txt"
    path = os.path.join(VENV, "constraints.txt")
    with open(os.path.join(ROOT, "constraints.txt")) as f, open(path, "w") as out:
        out.writelines(line for line in f if not line.startswith("triton=="))
    return path


def cuda_build():
    """The CUDA version that the installed torch was built for; None for a CPU build or without torch."""
    found = re.search(r"^cuda.*= '(.+)'", read(os.path.join(site_packages(), "torch", "version.py")), re.M)
    return found[1] if found else None


def install_torch():
    """torch first, alone: on a machine without a GPU its CPU build, wherever pip can find one."""
    torch = re.findall(r"^torch==(\S+)", read(os.path.join(ROOT, "constraints.txt")), re.M)[0]
    if sys.platform == "linux" and not has_nvidia():
        if pip(f"installing torch {torch}, CPU build", f"torch=={torch}+cpu", *BUILD, quiet_failure=True):
            return True
        print("  pip finds no build of torch that is marked as CPU only; the plain one may bring\n"
              "  CUDA along (a few GB). To have a CPU build: set PIP_EXTRA_INDEX_URL to PyTorch's index for CPUs,\n"
              "  named on pytorch.org under \"Get started\", then make clean and the same command again.")
    return pip("installing torch " + torch, "torch==" + torch, *BUILD)


def repair(dists):
    """Installs these again, of which something is gone."""
    return bool(dists) and pip("repairing " + ", ".join(dists), "--force-reinstall", "--no-deps", *dists)


def make_layer(layer):
    """Installs a layer or repairs it; its stamp is written last. False if something installed cannot be imported."""
    gone = lost(layer) or []
    if gone and repair(owners(gone)) and not lost(layer):
        return True
    if os.path.exists(stamp(layer)):
        os.remove(stamp(layer))
    drop_half_installed()
    ok = layer != "run" or install_torch()
    if not (ok and pip("installing walkvllm" + EXTRAS[layer] + " from this folder", "--no-build-isolation",
                       "-e", "." + EXTRAS[layer], constraints=constraints_for(layer))):
        stop(f"pip could not install what `{layer}` needs: see above, and all of it in {LOG}.\n"
             "Run the same command again to go on from here.")
    if not run("trying the imports", [PYTHON, "-c", "import " + ", ".join(MODULES[layer].split())]):
        return False
    names = [n for n in os.listdir(site_packages()) if n != "__pycache__" and n[0] != "~"]
    with open(stamp(layer), "w", encoding="utf-8") as f:
        json.dump({"key": key(layer), "names": names}, f)
    if layer == "run" and cuda_build() and not has_nvidia():
        print("  Note: this torch is a CUDA build, and there is no NVIDIA driver here. It is large, and works on CPU.")
    return True


def main():
    if len(sys.argv) != 2 or sys.argv[1] not in LAYERS:
        sys.exit(__doc__)
    python = find_python()
    if python != sys.executable:
        sys.exit(subprocess.call([python] + sys.argv))
    if sys.argv[1] != "run" and shutil.which("git") is None:
        stop("The tests look at the files that git tracks, and there is no git on PATH.")
    wait_for_others()
    make_venv(python)
    for layer in LAYERS[sys.argv[1]]:
        if lost(layer) != [] and not make_layer(layer):
            print("  Something is installed and cannot be imported (see above): making .venv anew")
            shutil.rmtree(VENV)
            make_venv(python)
            if not all(make_layer(again) for again in LAYERS[sys.argv[1]]):
                stop("A new environment has the same fault: see above.")
            return


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("Interrupted. The same command goes on from here.")
