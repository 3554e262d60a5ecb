#!/usr/bin/env bash
# The study of docs/generation.md on digits: recipe=dit3_digits, its twin without inner step and its softmax twin, three
# seeds each, and the first two once more with three blocks; trained, sampled, scored by a classifier that it trains first.
#   bash scripts/study_generation.sh [OUTPUT] [SEEDS] [AT_ONCE]      # default: runs "0 1 2" 2; about an hour on two cores
# Stop it at any time; the same command goes on with what is missing. Needs pip install -e '.[gen]'.
set -euo pipefail
cd "$(dirname "$0")/.."
export output=${1:-runs} OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
seeds=${2:-0 1 2} at_once=${3:-2}
python=${VIT3_PYTHON:-python}
export python judge="$output/digits-judge"

[ -f "$judge/predictions.png" ] || "$python" tools/train.py "output=$output" name=digits-judge resume=auto engine.threads=1

one() { # NAME SEED [KEY=VALUE ...]
  local run="$1-$2" seed=$2
  shift 2
  local samples="$output/samples/$run" page="docs/generation/$run"
  [ -f "$output/$run/samples.png" ] ||
    "$python" tools/train.py recipe=dit3_digits "output=$output" "name=$run" resume=auto "engine.seed=$seed" "$@"
  "$python" tools/sample.py "checkpoint=$output/$run" n=500 "seed=$seed" threads=1 "output=$output/samples" "name=$run"
  mkdir -p "$page"
  "$python" tools/eval_generation.py "samples=$samples" reference=digits "classifier=$judge" threads=1 \
    "output=$page/scores.json"
  cp "$output/$run/summary.json" "$samples/sheet.png" "$page/"
}
export -f one

{
  for seed in $seeds; do
    printf '%s\n' "trained $seed" "no_update $seed inner.epochs=0" "softmax $seed mixer=softmax"
  done
  printf '%s\n' "deep 0 model.kwargs.depth=3" "deep_no_update 0 model.kwargs.depth=3 inner.epochs=0"
} | xargs -P "$at_once" -I{} bash -c 'set -euo pipefail; one {}'
