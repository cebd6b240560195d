#!/bin/bash
# bash scripts/gpu_check.sh [--dry-run] [--out gpu_check.json]
# Everything that a GPU changes, in one command and one JSON: tests, SAM ViT-B against torch, the default run.
# Install first: pip install -e '.[cuda,test]'. Takes up to ten minutes; --dry-run needs no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
