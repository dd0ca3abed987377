#!/usr/bin/env bash
# Runs the tests in two processes; arguments go to pytest:  bash launch/test.sh [-m slow] [tests/models]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment "[test]"
ruff check .
ruff format --check .
python -m pytest --numprocesses=2 "$@"
