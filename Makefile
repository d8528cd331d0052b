# Two commands need nothing but Python 3.11 to 3.13, pip and make:
#   make demo     trains a small XTTS on speech made on the spot, and lets it speak
#   make test     everything that must hold
# Options go through ARGS, as in: make demo ARGS=--json.  GPU=1 lets the tests see the GPU and runs those that need one.

bin = .venv/bin
ready = .venv/.installed
hide_gpu = $(if $(GPU),,CUDA_VISIBLE_DEVICES=-1)
env = $(hide_gpu) TF_CPP_MIN_LOG_LEVEL=2 MPLBACKEND=Agg
# Where images of Docker set it, each process compiles the 2,000 modules of TensorFlow anew, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test style quick-pages slow-pages quick-tests test-all test-part test-torch test-browser records readme docs export clean lock

help:
	@echo "make demo      train a small XTTS, measure each bottleneck before and after, and let it speak"
	@echo "make test      style, notebooks and library in step, every notebook, the quick tests"
	@echo "make test-all  make test, all slow tests, and test-torch"
	@echo "make test-part  one of $(parts) parts of the slow tests, which the commit chooses; about 10 minutes each"
	@echo "make test-torch  what reads coqui's files, with PyTorch's CPU build in .venv-convert"
	@echo "make test-browser  all lessons in JupyterLab and a Chromium, which it installs where there is none"
	@echo "make export    write the library from the notebooks, and clean them"
	@echo "make records   measure the records of the lessons anew (on the CPU; GPU=1: on the GPU; after make demo), and draw the pages; parts: dev/records.py"
	@echo "make readme    write README.md from nbs/index.ipynb"
	@echo "make docs      write the pages into _docs"
	@echo "make lock      renew requirements.lock (needs uv; ARGS=--upgrade takes newer versions)"
	@echo "make clean     remove what can be made again; .venv, .venv-convert, runs, cache and data stay"
	@echo "ARGS='...' passes options on; GPU=1 tests and measures on the GPU; PYTHON=... chooses the interpreter of a new .venv."

$(ready): pyproject.toml requirements.lock
	@sh dev/venv.sh

demo: $(ready)
	@$(bin)/xtts-nb demo $(ARGS)

# Pages, whose sizes are tiny, and the tests that are not slow compile cheaply, see dev/quick.py.
quick_xla = $(env) XLA_FLAGS="$$($(bin)/python dev/quick.py)"
device = $(if $(GPU),gpu,cpu)
other = $(if $(GPU),cpu,gpu)
two_pages = --n-workers 2 --timing
quick_tests = $(env) $(bin)/pytest -n 2 --dist worksteal -m "not slow and not $(other)" $(ARGS)
# Side by side, since pages and tests often wait: for what they measure, and for processes.
test: $(ready)
	@$(MAKE) --no-print-directory -j3 style quick-pages quick-tests

style:
	@echo "== style, notebooks, library and words"
	@$(bin)/ruff check nbs xtts_nb tests dev benchmarks
	@$(bin)/python dev/in_step.py
	@$(bin)/python dev/words.py

quick-pages:
	@echo "== every notebook"
	@$(quick_xla) $(bin)/nbdev-test $(two_pages) --flags "$(device)"

quick-tests:
	@echo "== tests"
	@$(quick_tests) || [ $$? -eq $(none) ]

# The lessons run in tests/test_browser.py, with their slow cells, at the sizes that a user gets. ARGS may choose tests
# of one kind alone: pytest exits with 5 where there are none.
none = 0
test-all: $(ready)
	@$(MAKE) --no-print-directory -j4 test-torch style slow-pages quick-tests none=5
	@echo "== slow tests"
	@$(env) $(bin)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "slow and not alone and not $(other)" $(ARGS) \
	    || [ $$? -eq 5 ]
	@echo "== slow tests that measure this machine"
	@$(env) $(bin)/pytest -m "slow and alone and not $(other)" $(ARGS) || [ $$? -eq 5 ]

slow-pages:
	@echo "== every notebook but the lessons, with its slow cells"
	@$(quick_xla) $(bin)/nbdev-test $(two_pages) --skip-file-re '^[_.0-9]' --flags "slow $(device)"

# Parts of about the same length by the seconds in dev/durations.json, which are renewed by
# make test-all ARGS="--store-durations --durations-path dev/durations.json"
parts = 6
part = $(shell expr $$(printf %d 0x$$(git rev-parse --short=7 HEAD || echo 0)) % $(parts) + 1)
test-part: $(ready)
	@echo "== part $(part) of $(parts) of the slow tests"
	@$(env) $(bin)/pytest -n 2 --dist worksteal -m "slow and not gpu" --splits $(parts) --group $(part) \
	    --durations-path dev/durations.json $(ARGS)

test-torch: $(ready)
	@$(env) sh dev/torch.sh $(ARGS)

test-browser: $(ready)
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	    apt-get install -y chromium 2>/dev/null || $(bin)/playwright install chromium
	@$(env) $(bin)/pytest -rs -m '' tests/test_browser.py $(ARGS)
	@echo "What it saw: runs/browser"

export: $(ready)
	@$(bin)/nbdev-export
	@$(bin)/nbdev-clean

records: $(ready)
	@$(env) $(bin)/python dev/records.py renew $(ARGS)
	@$(bin)/python dev/pages.py readme

readme: $(ready)
	@$(bin)/python dev/pages.py readme

docs: $(ready)
	@$(bin)/python dev/pages.py docs

lock:
	@command -v uv >/dev/null || { echo "make lock needs uv: pip install uv." >&2; exit 2; }
	@uv pip compile --quiet --universal --python-version 3.11 --extra dev --no-annotate \
	    --custom-compile-command "make lock" pyproject.toml -o requirements.lock $(ARGS)
	@echo "requirements.lock holds the versions that the next make installs."

clean:
	rm -rf build dist _docs _proc _site *.egg-info .pytest_cache .ruff_cache nbs/nbdev.yml
	find nbs xtts_nb tests dev -name __pycache__ -prune -exec rm -rf {} + -o -name .ipynb_checkpoints -prune -exec rm -rf {} +
