#!/usr/bin/env bash
# Tests and measures on a machine with a GPU, in 8 minutes:
#
#     benchmarks/gpu.sh [--dry-run] OUT
#
# OUT gets tests.txt, sweep.json, sweep.md and machine.txt. --dry-run tries the script on CPU.
# Exit code 1 if a test failed or nothing was measured; what was measured is written all the same.
#
# PYTHON         interpreter with torch, onnx, onnxscript, onnxruntime-gpu, click, rich and
#                safetensors; for the tests pytest and hypothesis too (default python3)
# TEST_SECONDS   time for the tests (default 180)
# SWEEP_SECONDS  time box of the sweep (default 240)
set -uo pipefail

dry_run=()
if [[ ${1:-} == --dry-run ]]; then
    dry_run=(--dry-run)
    shift
fi
if [[ $# -ne 1 ]]; then
    echo "usage: benchmarks/gpu.sh [--dry-run] OUT" >&2
    exit 2
fi
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
python=${PYTHON:-python3}
sweep_seconds=${SWEEP_SECONDS:-240}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
failed=0

{
    command -v nvidia-smi >/dev/null && nvidia-smi
    "$python" --version
    "$python" -c 'import torch, onnxruntime as o; print(torch.__version__, o.__version__)'
} >"$out/machine.txt" 2>&1

echo "tests"
# torch first: its CUDA libraries then serve ONNX Runtime too. Only files with a GPU test are
# named, because collecting the others takes time.
mapfile -t files < <(grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
timeout "${TEST_SECONDS:-180}" "$python" -c 'import sys, torch, pytest; sys.exit(pytest.main(sys.argv[1:]))' \
    -m gpu -q --durations=10 -p no:cacheprovider "${files[@]}" >"$out/tests.txt" 2>&1 || failed=1
tail -n 25 "$out/tests.txt"

echo "sweep"
timeout "$((sweep_seconds + 60))" "$python" benchmarks/gpu/sweep.py "$out" \
    --seconds "$sweep_seconds" "${dry_run[@]}" || failed=1
exit "$failed"
