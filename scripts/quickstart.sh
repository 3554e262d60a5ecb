#!/usr/bin/env bash
# Installs into .venv, trains a small ViT³ on real handwritten digits (a few minutes on two CPU cores, no download of
# data), tests it, and leaves curves and a sheet of test images with predictions. Arguments go to tools/train.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

cd "$root"
name="quickstart-$(date +%Y%m%d-%H%M%S)-$$"
"$VIT3_PYTHON" tools/train.py "name=$name" output=runs "$@"
"$VIT3_PYTHON" tools/eval.py "checkpoint=runs/$name"
say "look at: $root/runs/$name/curves.png"
say "         $root/runs/$name/predictions.png"
