"""What started this process, read from the environment: torchrun, srun, submitit, or nothing (then it is alone)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vit3.errors import UserError


@dataclass(frozen=True)
class Place:
    """This process among all that one launcher started.

    Attributes:
        rank, local_rank: its number among all, and among those of its machine. world_size: how many there are.
        meeting: ``tcp://HOST:PORT``, or ``env://`` where the launcher has set the variables that torch reads.
        one_gpu_each: whether the launcher may show every process a single GPU, its own.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    meeting: str = "env://"
    one_gpu_each: bool = False


def find_place(env: Mapping[str, str]) -> Place:
    """The place that ``env`` (``os.environ``) describes.

    Raises:
        UserError: the variables contradict each other, or one is missing.
    """
    return _torchrun(env) or _submitit_local(env) or _slurm_step(env) or Place()


def first_host(nodes: str) -> str:
    """First machine of a SLURM node list: ``node[003-004,7],gpu1`` -> ``node003``.

    Raises:
        UserError: it is no such list.
    """
    head = re.match(r"(?:[^\[\],]|\[\d[\d,-]*\])+(?=,|$)", nodes)
    if head is None:
        raise UserError(f"SLURM's node list '{nodes}' cannot be read; export MASTER_ADDR=HOST of the first process")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head[0])


def _torchrun(env: Mapping[str, str]) -> Place | None:
    """torchrun and whatever else sets its variables: torch.distributed.launch, Ray Train, Kubernetes' operators."""
    given = [name for name in ("RANK", "WORLD_SIZE") if name in env]
    if not given:
        return None
    if len(given) == 1:
        other = "WORLD_SIZE" if given == ["RANK"] else "RANK"
        raise UserError(
            f"{given[0]}={env[given[0]]} is set and {other} is not; torchrun sets both, one process needs neither"
        )
    world_size = _number(env, "WORLD_SIZE", low=1)
    rank = _number(env, "RANK", below=world_size, of="WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if world_size > 1 and not env.get(name):
            raise UserError(
                f"WORLD_SIZE={world_size} is set and {name} is not; start with torchrun, or export where rank 0 listens"
            )
    return Place(rank, _number(env, "LOCAL_RANK", default=0), world_size)


def _submitit_local(env: Mapping[str, str]) -> Place | None:
    """submitit's local executor with several tasks; on SLURM its jobs are ordinary steps."""
    if env.get("SUBMITIT_EXECUTOR") != "local" or "SUBMITIT_LOCAL_GLOBALID" not in env:
        return None
    world_size = _number(env, "SUBMITIT_LOCAL_NTASKS", low=1)
    rank = _number(env, "SUBMITIT_LOCAL_GLOBALID", below=world_size, of="SUBMITIT_LOCAL_NTASKS")
    port = _port(_number(env, "SUBMITIT_LOCAL_JOB_ID"))
    return Place(rank, _number(env, "SUBMITIT_LOCAL_LOCALID"), world_size, f"tcp://127.0.0.1:{port}")


def _slurm_step(env: Mapping[str, str]) -> Place | None:
    """A step of several tasks, which only srun makes.

    The shell of salloc and the script of sbatch carry SLURM_NTASKS=8 and SLURM_PROCID=0 too; there this process is
    alone and would wait for seven that nobody started.
    """
    if _number(env, "SLURM_STEP_NUM_TASKS", default=1, low=1) == 1:
        return None
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    rank = _number(env, "SLURM_PROCID", below=world_size, of="SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    host = env.get("MASTER_ADDR") or first_host(nodes)
    port = env.get("MASTER_PORT") or _port(_number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID", default=0))
    return Place(rank, _number(env, "SLURM_LOCALID"), world_size, f"tcp://{host}:{port}", one_gpu_each=True)


def _port(job: int, step: int = 0) -> int:
    """The same for all processes of a step, and most likely another for the next; below those that systems hand out."""
    return 10_000 + (job + 977 * step) % 20_000


def _number(
    env: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    low: int = 0,
    below: int | None = None,
    of: str = "",
) -> int:
    text = env.get(name, None if default is None else str(default))
    if text is None:
        raise UserError(f"{name} is not set, though other variables of its launcher are; start with torchrun or srun")
    if not re.fullmatch(r"\d+", text) or int(text) < low:
        raise UserError(f"{name}={text} must be a whole number, at least {low}")
    if below is not None and int(text) >= below:
        raise UserError(f"{name}={text} must be below {of}={below}; start with torchrun or srun, which set both")
    return int(text)
