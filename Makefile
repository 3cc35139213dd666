.PHONY: help setup demo lint test docs check-package size bench nightly \
    sweep seeds faults servers browser spark cluster rehearsal package oldest mutants simulate

# Compiled once: programs that tests start import all of the package.
unexport PYTHONDONTWRITEBYTECODE

MINUTES ?= 10
FIRST ?= 100000
PYTEST = .venv/bin/pytest
PIP = .venv/bin/python -m pip install --disable-pip-version-check --quiet \
    --constraint .ci/constraints.txt
HERE = not servers and not browser and not cluster and not faults and not benchmarks
QUICK = not sweep and $(HERE) and (smoke or not spark)
ALL = --hypothesis-profile sweep
NIGHTLY = sweep seeds faults servers browser spark cluster rehearsal package oldest

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile | sed 's/ - /\t/'

setup:  ## make .venv with everything in it (the others do this by themselves)
	@.ci/setup

demo: setup  ## run the main job on real data: netCDF, commits, xarray, Spark, a stream
	rm -rf zarr-manifests-demo
	.venv/bin/zarr-manifests demo

lint: setup  ## check style, types and layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: lint  ## run lint and the tests
	$(PYTEST) -m "$(QUICK)" -n auto --dist loadgroup --durations 10

docs: setup  ## build the documentation's site into site/, strictly
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --config-file .mkdocs.yml

check-package: setup  ## build a wheel, and run the demo with it in an empty environment without Java
	@.ci/try-package wheel

size:  ## count the lines of the package and of the tests
	@.ci/size zarr_manifests && .ci/size tests

bench: setup  ## compare with other stores; ARGS="--quick --only small-read-fused" and so on
	$(PIP) --group bench
	.venv/bin/python tests/benchmarks $(ARGS)

nightly: $(NIGHTLY)  ## run what make test leaves out, part by part

sweep: setup  ## nightly: crashes and interrupts at every call, and more examples
	$(PYTEST) -m "$(HERE) and not spark and (sweep or hypothesis)" --ignore tests/simulation $(ALL) \
	    -n auto --dist worksteal

seeds: setup  ## nightly: the simulation with 2,000 seeds, and all faults that are planted
	$(PYTEST) --seeds 2000 -n auto --dist worksteal tests/simulation

faults: setup  ## nightly: everything that can be done to the network
	$(PYTEST) -m faults $(ALL) -n auto tests/storage

servers: setup  ## nightly: each server of object stores, and other readers of Zarr
	@.ci/setup-servers
	$(PIP) --group readers
	$(PYTEST) -m servers $(ALL) -n auto tests/storage tests/api/serving

browser: setup  ## nightly: the pages of zarr-manifests serve in Chromium
	@.ci/setup-browser
	$(PYTEST) -m browser tests/api/browser

spark: setup  ## nightly: all tests that start Spark
	$(PYTEST) -m "spark and not benchmarks"

cluster: setup  ## nightly: kill tasks, executors and drivers of a Spark cluster
	$(PYTEST) -m cluster -n 2 tests/spark

rehearsal: setup  ## nightly: each row of the benchmarks once
	$(PIP) --group bench
	$(PYTEST) -m benchmarks tests/docs/test_benchmarks.py

package: setup  ## nightly: build wheel and sdist, and try them in empty environments
	@.ci/try-package wheel sdist

oldest:  ## nightly: the tests of make test on Python 3.12 with the oldest dependencies
	@VENV=.venv-oldest .ci/setup
	.venv-oldest/bin/pytest -m "$(QUICK) and not spark" -n auto --dist worksteal

mutants: setup  ## break each rule of tests/planted, and see that a test of make test finds it
	.venv/bin/python tests/planted $(ARGS)

simulate: setup  ## try other seeds than make seeds does (MINUTES=10 FIRST=100000)
	.venv/bin/python tests/simulation --minutes $(MINUTES) --first $(FIRST)
