#!/usr/bin/env bash
# Checks and times the kernels on this machine's GPU, without network, in at most 8 minutes:
#   bash scripts/gpu_check.sh [FOLDER]        results as CSV, Markdown and a picture in FOLDER (docs/benchmarks/gpu)
# DEVICE=cpu tries the script itself where there is no GPU; VIT3_PYTHON names an interpreter that has everything.
set -uo pipefail

if [ -z "${VIT3_PYTHON:-}" ]; then
    source "$(dirname "${BASH_SOURCE[0]}")/env.sh" || exit 1
    set +e
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root" || exit 1
device="${DEVICE:-cuda}"
out="${1:-docs/benchmarks/gpu}"
mkdir -p "$out" || exit 1
failed=0

stage() { # stage NAME SECONDS COMMAND...: later stages run whatever happened to earlier ones
    local name="$1" limit="$2"
    shift 2
    echo "== $name (at most $limit s)"
    timeout "$limit" "$@" || { echo "== $name failed (status $?)"; failed=1; }
}

quick=()
[ "$device" = cpu ] && quick=(--quick)
stage "self-test" 150 "$VIT3_PYTHON" tools/selftest.py --device "$device" "${quick[@]}" --csv "$out/selftest.csv" --markdown "$out/selftest.md"
stage "training against the closed form" 60 "$VIT3_PYTHON" -m vit3.analysis.loss_parity "$device" "$out/loss_parity.md"
stage "benchmark: op and mixer" 120 "$VIT3_PYTHON" tools/benchmark.py --device "$device" "${quick[@]}" --level op,mixer --out "$out/mixer"
stage "benchmark: growth and models" 140 "$VIT3_PYTHON" tools/benchmark.py --device "$device" "${quick[@]}" --level growth,model --out "$out/model"
[ "$failed" = 0 ] && echo "== all passed; results in $out" || echo "== something failed; results in $out"
exit "$failed"
