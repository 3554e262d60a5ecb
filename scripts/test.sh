#!/usr/bin/env bash
# Makes the environment if it is missing and runs the tests. Arguments go to pytest (for instance: -m slow).
set -euo pipefail
extras=dev,mm,gen,export
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

cd "$root"
if [ $# = 0 ]; then # everything: two files at a time, for a test computes on one thread
    set -- -n 2 --dist loadfile --no-loadscope-reorder
fi
exec "$VIT3_PYTHON" -m pytest "$@"
