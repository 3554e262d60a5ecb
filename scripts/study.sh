#!/usr/bin/env bash
# All sweeps of configs/ablation at a scale that fits two cores, and their tables under docs/study:
#   bash scripts/study.sh [OUTPUT] [SEEDS]        # default: runs 0,1; about an hour, two cells at a time
# Stop it at any time; the same command goes on with what is missing. Needs pip install -e '.[joblib]'.
set -uo pipefail
cd "$(dirname "$0")/.."
output=${1:-runs} seeds=${2:-0,1} status=0
export OMP_NUM_THREADS=1
for file in configs/ablation/*.yaml; do
  name=$(basename "$file" .yaml)
  python tools/train.py -m "ablation=$name" "output=$output" "engine.seed=$seeds" \
    hydra/launcher=joblib hydra.launcher.n_jobs=2 || status=1
  python tools/summarize.py "sweep=$output/sweeps/$name" to=docs/study || status=1
done
exit $status
