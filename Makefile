.PHONY: help setup wheels demo test unit slow check bench sharing simulate campaign models mutants captures clean

help: ## list targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: ## .venv with mlxsup and its development tools
	@tools/setup.sh

wheels: setup ## mlxsup and mlxsup-client, the client without MLX, into dist/
	@rm -rf build/lib build/bdist.* packaging/client/build  # or files that are gone would be in them
	@.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./packaging/client

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

check: setup ## format, lint and types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: setup models/smollm2/config.json ## throughput, router CPU, memory and start-up, side by side
	@.venv/bin/python -m bench

sharing: setup models/smollm2/config.json ## every figure and plot of docs/sharing.md, measured at this commit
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cpu,dev,plots]'
	@PYTHONPATH=tests .venv/bin/python -m bench.sharing

SEEDS ?= 10000
FIRST ?= 1

simulate: setup ## the core under 10,000 seeds of faults in virtual time, then planted bugs
	@PYTHONPATH=tests .venv/bin/python -m simulation --seeds $(SEEDS) --first $(FIRST)
	@PYTHONPATH=tests .venv/bin/python -m simulation.mutants

mutants: setup ## random bugs in every part that fast tests must notice: docs/mutants.md; an hour
	@PYTHONPATH=typings:tests .venv/bin/python -m mutation

campaign: setup ## strike real daemons and judge every promise: ONLY="kills P29", LIST=1; hours without
	@PYTHONPATH=tests .venv/bin/python -m campaign $(if $(ONLY),--only $(ONLY)) $(if $(LIST),--list)

models: setup ## every model type of mlx-lm as a tiny model, for the tables of docs/models.md; ten minutes
	@PYTHONPATH=tests .venv/bin/python -m support.model_types

captures: setup models/smollm2/config.json ## redraw the pictures in docs/images
	@.venv/bin/python tools/captures.py
	@PYTHONPATH=tests .venv/bin/python tools/page_pictures.py

clean: ## remove everything that make made
	rm -rf .venv build dist models *.egg-info typings/*.egg-info packaging/*/build packaging/*/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
