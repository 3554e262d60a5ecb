"""What an environment says about a process; nobody waits for processes that no launcher started."""

from __future__ import annotations

import pytest

from vit3.engine.place import Place, find_place, first_host
from vit3.errors import UserError

TORCHRUN = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1")
BATCH = dict(SLURM_JOB_ID="12", SLURM_NTASKS="8", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_JOB_NODELIST="n[2-3]")
STEP = BATCH | dict(
    SLURM_STEP_ID="1", SLURM_STEP_NUM_TASKS="8", SLURM_STEP_NODELIST="n3,n2", SLURM_PROCID="5", SLURM_LOCALID="1"
)
LOCAL = dict(
    SUBMITIT_EXECUTOR="local", SUBMITIT_LOCAL_NTASKS="2", SUBMITIT_LOCAL_GLOBALID="1", SUBMITIT_LOCAL_LOCALID="1",
    SUBMITIT_LOCAL_JOB_ID="7",
)  # fmt: skip


def without(env, name):
    return {key: value for key, value in env.items() if key != name}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place()),
        (TORCHRUN, Place(3, 1, 4)),
        (TORCHRUN | STEP, Place(3, 1, 4)),  # torchrun started by srun
        (without(TORCHRUN, "LOCAL_RANK"), Place(3, 0, 4)),
        (dict(RANK="0", WORLD_SIZE="1"), Place()),
        (BATCH, Place()),  # an sbatch script or an salloc shell
        (BATCH | dict(SLURM_STEP_NUM_TASKS="1"), Place()),  # an salloc shell that is a step of its own
        (BATCH | dict(MASTER_ADDR="n2"), Place()),
        (STEP, Place(5, 1, 8, "tcp://n3:10989", True)),
        (without(STEP, "SLURM_STEP_NODELIST"), Place(5, 1, 8, "tcp://n2:10989", True)),
        (STEP | dict(MASTER_ADDR="m", MASTER_PORT="9"), Place(5, 1, 8, "tcp://m:9", True)),
        (LOCAL, Place(1, 1, 2, "tcp://127.0.0.1:10007")),
        (LOCAL | STEP, Place(1, 1, 2, "tcp://127.0.0.1:10007")),
    ],
)
def test_place(env, place):
    assert find_place(env) == place


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (dict(WORLD_SIZE="8"), "WORLD_SIZE=8 is set and RANK is not"),
        (dict(RANK="0"), "RANK=0 is set and WORLD_SIZE is not"),
        (TORCHRUN | dict(RANK="4"), "RANK=4 must be below WORLD_SIZE=4"),
        (TORCHRUN | dict(LOCAL_RANK="-1"), "LOCAL_RANK=-1 must be a whole number, at least 0"),
        (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE=4 is set and MASTER_ADDR is not"),
        (without(TORCHRUN, "MASTER_PORT"), "WORLD_SIZE=4 is set and MASTER_PORT is not"),
        (without(STEP, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (STEP | dict(SLURM_STEP_NODELIST="n[2"), "node list 'n\\[2' cannot be read; export MASTER_ADDR"),
    ],
)
def test_contradictions_are_said(env, sentence):
    with pytest.raises(UserError, match=sentence):
        find_place(env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node[003-004,7],gpu1", "node003"), ("gpu1", "gpu1"), ("gpu-1.x,gpu2", "gpu-1.x"), ("node[7]", "node7"),
        ("rack[1-2]n[03,5]-ib", "rack1n03-ib"),
    ],
)  # fmt: skip
def test_first_host(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "n[", "n[]", ",n", "n[1-2"])
def test_no_node_list(nodes):
    with pytest.raises(UserError, match="cannot be read"):
        first_host(nodes)
