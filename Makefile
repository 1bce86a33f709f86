.PHONY: help setup release demo test unit slow check bench simulate campaign mutants reference page clean

help: ## list targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: ## .venv with mlxsup and its development tools
	@tools/setup.sh

release: setup models/smollm2/config.json ## sdists and wheels in dist/, each tried in clean environments, checksums, formula
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check uv
	@PATH=".venv/bin:$$PATH" .venv/bin/python packaging/release.py

models/smollm2/config.json: | setup
	@.venv/bin/python -m mlxsup.cli.demo_model models/smollm2

demo: setup models/smollm2/config.json ## two workers with a real model, a crash, a restart: two minutes
	@.venv/bin/mlxsup demo --config config.example.toml

test: setup models/smollm2/config.json ## all tests but the slow ones: six minutes on two cores
	PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n auto --dist worksteal -m 'not slow'

unit: setup ## the tests that need no processes or sockets: seconds
	PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest tests/unit -m 'not slow'

SLOW ?= tests

slow: setup models/smollm2/config.json ## the tests that take minutes each; SLOW=folder or file
	PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -m slow $(SLOW)

check: setup ## format, lint, imports, types and documents; then what proselint advises
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports --no-logo
	.venv/bin/mypy
	.venv/bin/python tools/check_docs.py
	@.venv/bin/proselint check README.md CHANGELOG.md docs || true

page: ## the libraries of the web page with their licences, into gateway/page/files; needs npm
	@npm install --prefix tools/page --no-package-lock --no-audit --no-fund --silent
	@npm run --prefix tools/page --silent build

bench: setup models/smollm2/config.json ## bursts, processor time, sharing and commands, side by side; then docs/benchmarks.md
	@.venv/bin/python -m bench

SEEDS ?= 10000
FIRST ?= 1

simulate: setup ## the core under 10,000 seeds of faults in virtual time
	@PYTHONPATH=tests .venv/bin/python -m simulation --seeds $(SEEDS) --first $(FIRST)

PACKAGES ?=

mutants: setup ## small bugs that no unit test notices, with mutmut; PACKAGES="store cli"; a night
	@tools/mutants.sh $(PACKAGES)

campaign: setup ## strike real daemons and judge every promise: ONLY="kills P29", LIST=1; hours without
	@PYTHONPATH=tests .venv/bin/python -m campaign $(if $(ONLY),--only $(ONLY)) $(if $(LIST),--list)

reference: setup ## from the code: config.example.toml and its schema
	@.venv/bin/python tools/reference.py

clean: ## remove everything that make made
	rm -rf .venv build dist models *.egg-info typings/*.egg-info packaging/*/build packaging/*/*.egg-info .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
