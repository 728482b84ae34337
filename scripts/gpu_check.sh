#!/usr/bin/env bash
# The checks that need a CUDA GPU: correctness against plain PyTorch, the tests that use the GPU, and a table of speed,
# MFU and peak memory. Under 25 minutes on one H200. Where there is no GPU it says so and ends well.
# Usage: scripts/gpu_check.sh [--markdown docs/performance.md] [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" scripts/gpu_check.py "$@"
