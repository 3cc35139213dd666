.PHONY: help setup demo test lint

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

test: lint  ## run what CI runs: lint, then all tests
	.venv/bin/pytest
