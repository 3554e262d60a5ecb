#!/usr/bin/env bash
# Makes the environment if it is missing and runs the tests. Arguments go to pytest (for instance: -m slow).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

cd "$root"
exec "$VIT3_PYTHON" -m pytest "$@"
