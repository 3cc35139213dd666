.PHONY: help setup demo test lint docs package servers browser spark cluster sweep simulate explore bench

MINUTES ?= 10
FIRST ?= 100000
QUICK = not servers and not browser and not spark and not cluster and not simulation and not faults and not benchmarks
ALL = --hypothesis-profile sweep --examples 2

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1 - /p' Makefile | sed 's/ - /\t/'

setup:  ## make .venv with everything in it (the others do this by themselves)
	@.ci/setup

demo: setup  ## run the main job on real data: netCDF, commits, xarray, Spark
	.venv/bin/zarr-manifests demo

lint: setup  ## check style, types and layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: lint  ## run lint and all tests but those of Spark and the sweeps
	.venv/bin/pytest -m "not sweep and $(QUICK)" -n auto
	.venv/bin/pytest -m "simulation and not sweep" --seeds 200 -n auto tests/simulation

docs: setup  ## build the documentation's site into site/, strictly, as CI does after make test
	.venv/bin/python -m pip install --disable-pip-version-check --quiet \
	    --constraint .ci/constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --config-file .mkdocs.yml

package: setup  ## build wheel and sdist, and try them in empty environments, as CI does after make docs
	@.ci/try-package

servers: setup  ## run the tests of each server of object stores and of other readers of Zarr, as CI does
	@.ci/setup-servers
	.venv/bin/python -m pip install --disable-pip-version-check --quiet \
	    --constraint .ci/constraints.txt --group readers
	.venv/bin/pytest -m servers $(ALL) -n auto tests/storage tests/serving

browser: setup  ## look at the pages of zarr-manifests serve in Chromium, as CI does after make servers
	@.ci/setup-browser
	.venv/bin/pytest -m browser tests/browser

spark: setup  ## run the tests that start Spark, as CI does after make browser
	.venv/bin/pytest -m spark $(ALL)

cluster: setup  ## kill tasks, executors and drivers of a Spark cluster, as CI does after make spark
	.venv/bin/pytest -m cluster -n 2

sweep: setup  ## run what CI runs at last: each benchmark once, all seeds, examples, crashes and faults
	.venv/bin/pytest -m benchmarks tests/test_benchmarks.py
	.venv/bin/pytest -m faults $(ALL) -n auto tests/storage
	.venv/bin/pytest -m "(sweep or hypothesis) and $(QUICK)" $(ALL) -n auto
	.venv/bin/pytest -m simulation --seeds 2000 -n auto tests/simulation

simulate: setup  ## try other seeds than make sweep does (MINUTES=10 FIRST=100000)
	.venv/bin/python tests/simulation --minutes $(MINUTES) --first $(FIRST)

explore: setup  ## try other examples of the property tests than make test does
	.venv/bin/pytest -m hypothesis --hypothesis-profile explore -n auto

bench: setup  ## compare with other stores; ARGS="--quick --only small-read-fused" and so on
	.venv/bin/python -m pip install --disable-pip-version-check --quiet \
	    --constraint .ci/constraints.txt --group bench
	.venv/bin/python tests/benchmarks $(ARGS)
