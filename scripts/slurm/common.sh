#!/usr/bin/env bash
# What the batch scripts share; sourced from the top of the checkout with the script's arguments.
# Sets: name, tool, python, nodes, gpus (per node; 0 without); the keys stay in $@. Gives: run_step, requeue.
# shellcheck disable=SC2034  # the scripts use them
set -uo pipefail

say() { printf '%s\n' "$*" >&2; }

if [ $# -eq 0 ] || [[ "$1" == *=* ]]; then
    say "error: the first argument must be the run's name; usage: sbatch [options] SCRIPT NAME [TOOL COMMAND CONFIG] [key=value ...]"
    exit 2
fi
name="$1"
shift
tool=(tools/train.py)
if [[ "${1:-}" == *.py ]]; then # tools/det.py train CONFIG
    tool=()
    while [ $# -gt 0 ] && [[ "$1" != *=* ]]; do
        tool+=("$1")
        shift
    done
fi
nodes="${SLURM_JOB_NUM_NODES:-1}"
gpus="${SLURM_GPUS_ON_NODE:-0}"
python="${VIT3_PYTHON:-python}"
[ -z "${VIT3_PYTHON:-}" ] && [ -x .venv/bin/python ] && python=.venv/bin/python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Both are set by signals to this shell.
warned=0  # SIGUSR1: two minutes to the time limit (--signal in the scripts)
stopped=0 # SIGTERM: scancel or preemption

run_step() { # run_step SIGNAL TASKS_PER_NODE COMMAND...: a step; it gets SIGNAL on a warning; its status in $status
    local signal="$1" tasks="$2" again=1 step
    shift 2
    # scancel tells the processes; srun does not pass every signal on (it dies of SIGTERM, and they with it)
    trap 'again=1; [ "$warned" = 1 ] || { warned=1; scancel --signal="$signal" "$SLURM_JOB_ID"; }' USR1
    trap 'stopped=1 again=1' TERM
    # One process that dies ends the others after two minutes. It must not end them at once: they may be saving.
    srun --nodes="$nodes" --ntasks="$((nodes * tasks))" --ntasks-per-node="$tasks" \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=120 "$@" &
    step=$!
    while [ "$again" = 1 ]; do # a signal ends `wait` before the step has ended
        again=0
        wait "$step"
        status=$?
    done
    trap '' USR1 TERM
}

requeue() {
    say "stopped early with everything saved; job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
}
