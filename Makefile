# Two commands for a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: demo test wheel newcomer browser tables docs clean

demo: $(VENV)/.demo
	$(BIN)/stquant demo --out demo

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Builds the wheel and tries it in an environment that has no other copy of the package; torch and
# the like come from $(VENV), whose .pth files do not count there.
wheel: $(VENV)/.dev
	rm -rf build/wheel build/fresh
	$(BIN)/python -m build --wheel --outdir build/wheel .
	$(BIN)/python -m venv build/fresh
	build/fresh/bin/pip install --quiet --no-deps --no-index build/wheel/*.whl
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' >$$(echo build/fresh/lib/python3*/site-packages)/base.pth
	cd build && fresh/bin/python -c 'import stquant._cpu as m; assert "fresh" in m.__file__, m.__file__'
	cd build && fresh/bin/stquant doctor

# The README's commands and examples, from an empty environment.
newcomer:
	$(PYTHON) .ci/newcomer.py $(TORCH)

# A headless browser for the tests of the report's page, where the system has one to install.
browser:
	@for name in chromium chromium-browser google-chrome chrome; do command -v $$name && exit; done; \
	{ apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null || \
	echo "no browser was found or could be installed; the tests of the report's page in a browser are skipped"

tables: $(VENV)/.dev
	$(BIN)/python -m benchmarks.tables

# The documentation as a site, in build/site; the tests build it, too.
docs: $(VENV)/.dev
	$(BIN)/mkdocs build

# torch comes first and pinned: any other package could pull another build of it.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist demo
