#!/usr/bin/env bash
# The machine's limits and the server under load, written into docs/performance.md; arguments go to bench.serving.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m bench.serving --concurrency 1 8 32 64 --docs docs/performance.md "$@"
