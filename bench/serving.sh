#!/usr/bin/env bash
# Measures the machine's limits and the server; arguments go to bench.serving. To replace the table in the page:
# bench/serving.sh --speculation off --docs docs/lab-notebook.md
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m bench.serving --concurrency 1 8 32 64 "$@"
