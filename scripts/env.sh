#!/usr/bin/env bash
# Makes .venv at the top of the checkout and installs vit3 into it; does nothing when that is done already.
# Sourced by the other scripts, which find the interpreter in $VIT3_PYTHON and may set $extras (of setup.py) before.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
VIT3_PYTHON="$venv/bin/python"

say() { printf '%s\n' "$*" >&2; }
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() { # $PYTHON if set, else the first that fits
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" && { echo "$PYTHON"; return; }
        say "error: PYTHON=$PYTHON is not a Python 3.10 to 3.13 with venv; unset PYTHON or name another"; return 1
    fi
    for candidate in python3 python3.12 python3.11 python3.13 python3.10 python; do
        command -v "$candidate" >/dev/null && fits "$candidate" && { command -v "$candidate"; return; }
    done
    say "error: no Python 3.10 to 3.13 with venv found; install one (Debian: apt install python3 python3-venv) or set PYTHON=/path/to/python"
    return 1
}

# Threads that wait for each other sleep instead of spinning: on two cores with other work on them, a training step of
# small tensors took 0.35 s this way and 5 s without. Has to be set before torch is imported.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# .venv/.installed: what it was made from, then the extras that are in it
extras="${extras:-dev}"
wanted="$(cat "$root/requirements.txt" "$root/setup.py" | cksum) $root"
there="$([ -x "$VIT3_PYTHON" ] && grep -qxF "$wanted" "$venv/.installed" 2>/dev/null && tail -n 1 "$venv/.installed" || true)"
if [[ ",$there," != *",$extras,"* ]]; then
    python="$(find_python)"
    if [ ! -x "$VIT3_PYTHON" ] || ! fits "$VIT3_PYTHON"; then
        say "making $venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear "$venv"
    fi
    say "installing vit3 and what it needs into $venv (several minutes the first time; PyTorch is large)"
    if ! "$VIT3_PYTHON" -m pip install --quiet --disable-pip-version-check -e "$root[$extras]" 2>"$venv/pip.log"; then
        tail -n 5 "$venv/pip.log" >&2
        say "error: the installation failed; is there a network? The whole log is $venv/pip.log; run this script again to go on"
        exit 1
    fi
    printf '%s\n%s\n' "$wanted" "$extras" >"$venv/.installed"
fi
