# Each command sets up what it needs in .venv first. With nothing to set up that takes a fraction of a second.

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
            $$p -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $$p && exit; done; \
            command -v python3)
endif
PY := .venv/bin/python
PAGES ?=

.PHONY: help walk test test-long test-real lab site site-run test-site text build check clean \
        setup-run setup-test setup-real setup-lab setup-site

help:
	@echo "make walk       follow one request through the engine"
	@echo "make test       run all tests: every cell of every page, and the checks of the house"
	@echo "make test-long  the same, and the tests that take minutes"
	@echo "make test-real  fetch a real model (98 MB) and compare with transformers"
	@echo "make site       build the website from what the pages have stored; site-run runs the pages first"
	@echo "make test-site  the same, and look at it in a browser (Debian: chromium, chromium-driver)"
	@echo "make lab        open the pages in JupyterLab"
	@echo "make text       the pages as plain Python in nbs_py/, to edit    (PAGES=\"06 07\" for some)"
	@echo "make build      the edited text back into pages, modules, outputs (PAGES=\"06 07\" for some)"
	@echo "make check      say where pages, modules and outputs disagree     (PAGES=\"06 07\" for some)"
	@echo "make oracle     our scheduler's decisions beside those of the real vLLM 0.22.0   (N=200 SEED=...)"
	@echo "make bench      walkvllm beside transformers, llama.cpp and vLLM, an hour   (ARGS=\"--help\" for more)"
	@echo "make setup-bench  the peers' environments alone: llama.cpp is compiled, vLLM takes some GB"
	@echo "make bench-schedule  what a step of the scheduler costs, beside vLLM 0.22.0"
	@echo "make bench-boundary  what the process boundary costs, and a recorded run: the data of pages 04b, 05 and 16c"
	@echo "make bench-trace     what a step costs with nobody listening, and with a recording: the data of page 16e"
	@echo "make bench-overhead  a step by its parts, what grows, and the start: the data of pages 19 and 19b"
	@echo "make fault-table     200 times something goes wrong between two processes: the data of page 04d"
	@echo "make diagnosis-table  ten kinds of slow runs, 20 times each, told apart: the data of page 17"
	@echo "make compile-report  compile all kernels for GPUs that are not here: the data of page 11a"
	@echo "make gpu        measure kernels and engine on the GPU of this machine   (TINY=1 anywhere, RECORD=1 for page 11a)"
	@echo "make clean      remove .venv and what was built"

walk: setup-run
	@$(PY) -m walkvllm walk

test: setup-test
	@$(PY) -m pytest

test-long: setup-test
	@$(PY) -m pytest --flags long

test-real: setup-real
	@$(PY) tools/fetch_smollm2.py
	@$(PY) -m pytest --flags real tests/test_real.py

lab: setup-lab
	@env $$($(PY) tools/cells.py) $(PY) -m jupyterlab --ServerApp.root_dir=. \
		--LabApp.default_url=/lab/tree/nbs/index.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

site: setup-site
	@$(PY) tools/website.py

site-run: setup-site
	@$(PY) tools/pages.py run
	@$(PY) tools/website.py

test-site: site
	@$(PY) -m pytest --flags site tests/test_site.py tests/test_player.py

text build check: setup-test
	@$(PY) tools/pages.py $@ $(PAGES)

.PHONY: bench bench-boundary bench-trace fault-table
bench: setup-test
	@$(PY) tools/bench/run.py $(ARGS)

.PHONY: setup-bench
setup-bench: setup-test
	@$(PY) tools/bench/environments.py $(ARGS)

bench-boundary: setup-test
	@$(PY) tools/bench_boundary.py
	@$(PY) tools/pages.py run 04b 05 16c

bench-trace: setup-test
	@$(PY) tools/bench_trace.py
	@$(PY) tools/pages.py run 16e

.PHONY: bench-overhead
bench-overhead: setup-test
	@$(PY) tools/bench_overhead.py $(ARGS)
	@$(PY) tools/pages.py run 19_performance 19b

fault-table: setup-test
	@WALKVLLM_FAULT_TABLE=walkvllm/data/faults.json $(PY) -m pytest --flags long tests/test_process.py -k many_times
	@$(PY) tools/pages.py run 04d

.PHONY: diagnosis-table
diagnosis-table: setup-test
	@$(PY) tools/record_latency.py
	@WALKVLLM_DIAGNOSES=walkvllm/data/diagnoses.json $(PY) -m pytest --flags long tests/test_latency.py -k many_times
	@$(PY) tools/pages.py run 17_latency

.PHONY: compile-report gpu
compile-report: setup-test
	@$(PY) tools/compile_kernels.py write
	@$(PY) tools/pages.py run kernels/11a

# On a GPU with the machine's own Python, which has the PyTorch that fits the GPU.
TINY ?=
RECORD ?=
gpu: $(if $(TINY),setup-test)
	@$(if $(TINY),$(PY),$(PYTHON)) tools/gpu_bench.py $(if $(TINY),--tiny) $(if $(RECORD),--record)

setup-run setup-test setup-real setup-lab setup-site:
	@if [ -z "$(PYTHON)" ]; then echo "There is no python3 on PATH. walkvllm needs Python 3.11 or newer."; exit 1; fi
	@$(PYTHON) tools/setup.py $(@:setup-%=%)

clean:
	rm -rf .venv build dist docs/_pages docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# With the real vLLM 0.22.0, as far as its scheduler needs it: in .oracle, an environment of its own (1.3 GB).
N ?= 200
SEED ?=
.PHONY: oracle bench-schedule setup-oracle
oracle: setup-oracle
	@PYTHONPATH=tools .oracle/bin/python -m oracle.compare --count $(N) $(if $(SEED),--seed $(SEED))

bench-schedule: setup-oracle
	@PYTHONPATH=tools .oracle/bin/python -m oracle.cost --write

setup-oracle:
	@if [ -z "$(PYTHON)" ]; then echo "There is no python3 on PATH. vLLM 0.22.0 needs Python 3.11 to 3.13."; exit 1; fi
	@$(PYTHON) tools/oracle/environment.py
