# The commands of a working day; CONTRIBUTING.md says when to run which.
.DEFAULT_GOAL := help
.PHONY: help install format check test unit slow coverage ci

help:      ## list these targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST)

install:   ## the program and what its tests need, into the active environment
	pip install -e '.[test]'

format:    ## format the sources and fix what ruff can fix
	ruff check --fix && ruff format

check:     ## formatting, lint and types; changes nothing
	ruff check && ruff format --check && mypy

unit:      ## tests without process groups of several ranks
	pytest tests/unit

test:      ## the quick part of the tests
	pytest

slow:      ## the slow part of the tests
	pytest -m slow

coverage:  ## the quick part with its coverage
	pytest --cov

ci:        ## a fresh environment, the quick part, the slow part
	.ci/run
