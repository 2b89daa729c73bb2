#!/bin/sh
# Measures prefuse on this machine's GPU in nine minutes: benchmarks/gpu/run.sh [FOLDER] [RESULTS.json], at the repository's root.
#
# FOLDER (build/gpu) is what `python -m benchmarks.gpu.prepare` wrote on a machine with TVM and nvcc; here Python 3.11 or newer,
# numpy, ml_dtypes and torch are enough. Results are written after each line, so that a run which is cut counts as far as it came.
set -eu
folder=${1:-build/gpu}
results=${2:-${OUT:-benchmarks/results}/gpu.json}
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
ln -s "$PWD" "$packages/prefuse"
export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
"${PYTHON:-python3}" -m prefuse.benchmarks.gpu.run "$folder" "$results"
