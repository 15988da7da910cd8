VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: build
build:
	@flock build.lock $(VENV)/bin/pip install -q --no-build-isolation --no-deps -e .
