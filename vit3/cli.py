"""What every tool does around its work: check the command line, say errors in one sentence, end the processes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vit3.arguments import MULTIRUN, check_arguments
from vit3.config import known_keys
from vit3.engine.distributed import stop_processes
from vit3.engine.signals import REQUEUE_CODE
from vit3.errors import Interrupted, UserError
from vit3.sweeps.ablation import expand_arguments, split_label
from vit3.sweeps.job import STOPPED, run_job
from vit3.sweeps.launch import Launch

# Our run folder holds everything, and our logging says it: Hydra writes no second folder and no log.
_QUIET = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.job.chdir=false", "hydra/job_logging=none")

# Launchers keep their own files (what was submitted, what it printed) beside the run folders.
_QUIET_SWEEP = ("hydra.sweep.dir=${output}/.jobs", "hydra.sweep.subdir=.", "hydra/hydra_logging=none")

_INTERRUPTED = UserError("stopped; resume=RUN_FOLDER goes on from its last checkpoint, if there is one")


def run_tool(
    main: Callable[[DictConfig], None], *, config_name: str, schema: type, configs: Path, cells: bool = False
) -> None:
    """Run ``main`` with the configuration that the command line composes.

    Args:
        main: gets the composed configuration. config_name: root file in ``configs``. schema: its dataclass.
        configs: folder of the configurations.
        cells: the runs of ``-m`` are cells of a sweep (:mod:`vit3.sweeps`), which are computed once.
    """
    launch = None
    try:
        arguments = sys.argv[1:]
        if "ablation" in known_keys(schema):
            arguments = expand_arguments(arguments, schema, configs)
        arguments = check_arguments(arguments, schema, configs)
        _check_diffusion(arguments, config_name, configs)
        many = bool(set(arguments) & set(MULTIRUN))
        if cells and many:
            launch = Launch([a for a in arguments if a not in MULTIRUN], sys.argv[1:], schema, configs)
    except UserError as error:
        _stop(error)
    except KeyboardInterrupt:  # composing the cells of a large table takes a minute
        _stop(UserError("stopped; no cell was started"), code=130)
    given = {argument.split("=")[0] for argument in arguments}
    quiet = [*_QUIET, f"hydra.job.name={config_name}"]
    if many and "output" in known_keys(schema):
        quiet += _QUIET_SWEEP
    sys.argv[1:] = [*arguments, *(argument for argument in quiet if argument.split("=")[0] not in given)]
    job = _Job(main, (schema, configs) if cells else None)
    start = hydra.main(version_base="1.3", config_path=str(configs), config_name=config_name)(job)
    if launch is not None:
        sys.exit(_start_sweep(start, launch, given))
    if "hydra/launcher" not in given:
        return start()
    _start_by_launcher(start)


def _check_diffusion(arguments: list[str], config_name: str, configs: Path) -> None:
    """Raise a UserError for a key of diffusion where there is none, which Hydra would say in three lines."""
    keys = [argument.split("=")[0] for argument in arguments if argument.startswith("diffusion.")]
    if not keys or set(arguments) & set(MULTIRUN):
        return
    others = [argument for argument in arguments if not argument.startswith(("diffusion.", "hydra", "-"))]
    with initialize_config_dir(str(configs), version_base="1.3"):
        diffusion = compose(config_name, overrides=others).get("diffusion")
    if "process" not in (diffusion or {}):  # a recipe's values may be there
        raise UserError(f"{keys[0]} means nothing to a classifier; add task=diffusion and diffusion=ddpm or flow")


def run_command(action: Callable[[], None]) -> None:
    """Run the work of a tool that Hydra does not start, with what every tool does around it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    try:
        action()
    except (UserError, Interrupted) as error:
        _stop(error, *((error.code, "") if isinstance(error, Interrupted) else ()))
    except KeyboardInterrupt:
        _stop(_INTERRUPTED, code=130)
    finally:
        stop_processes()


def _start_sweep(start: Callable[[], None], launch: Launch, given: set[str]) -> int:
    """Start the jobs of a sweep; returns the exit status once all have ended."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    for chatty in ("hydra", "hydra_plugins"):  # each job says one line itself
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if "hydra/launcher" not in given or launch.has_workers:
        launch.heed_signals()
    try:
        _start_by_launcher(start) if "hydra/launcher" in given else start()
    except SystemExit as end:
        if launch.signal is None and end.code not in (None, 0, 1):
            raise
    return launch.end()


def _start_by_launcher(start: Callable[[], None]) -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # what a launcher raises comes here, instead of being printed
    try:
        start()
    except UserError as error:
        _stop(error)
    except HydraException as error:
        _stop(UserError(str(error)))
    except Exception as error:
        if type(error).__name__ != "UncompletedJobError":
            raise
        _stop(UserError(f"a job ended without a result; {_last_words(str(error))}"), code=1)


class _Job:
    """``main`` with what every tool does around it, as Hydra calls it: here, or in a process of a launcher.

    A launcher pickles it: by file and name, because another process has no such ``__main__``.

    Args:
        cells: schema and folder of configurations where the jobs of ``-m`` are cells of a sweep, else None.
    """

    def __init__(self, main: Callable[[DictConfig], None], cells: tuple[type, Path] | None = None):
        self.main, self.cells = main, cells

    def __reduce__(self):
        return _load_job, (*self._address(), self.cells)

    def _address(self) -> tuple[str, str]:
        return str(Path(inspect.getfile(self.main)).resolve()), self.main.__name__

    def __call__(self, cfg: DictConfig) -> str | None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
        launcher = _launcher()
        try:
            if self.cells and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
                return self._compute_cell(launcher)
            return self.main(_labelled(cfg))
        except (UserError, Interrupted) as error:
            if launcher not in ("", "submitit"):
                raise  # a worker of Ray must not exit; its launcher hands the error to the command that started it
            _stop(error, *((error.code, "") if isinstance(error, Interrupted) else ()))
        except KeyboardInterrupt:
            _stop(_INTERRUPTED, code=130)
        except Exception:
            if launcher != "submitit":
                raise
            traceback.print_exc()  # Hydra would swallow it here, and SLURM would count the job as completed
            sys.exit(1)
        finally:
            stop_processes()

    def _compute_cell(self, launcher: str) -> str:
        schema, configs = self.cells
        in_place = launcher == "submitit"
        main = self.main if in_place else functools.partial(_run_main, *self._address())
        state = run_job(main, overrides(), schema, configs, in_place=in_place, worker=launcher != "")
        if state == STOPPED and not launcher:  # of the launchers, Hydra's own alone would go on with the next cell
            raise Interrupted("the sweep was stopped; the same command goes on with it", REQUEUE_CODE)
        return state


def _load_main(file: str, name: str) -> Callable[[DictConfig], None]:
    spec = importlib.util.spec_from_file_location("vit3_job", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _run_main(file: str, name: str, cfg: DictConfig) -> None:
    _load_main(file, name)(cfg)


def _load_job(file: str, name: str, cells: tuple[type, Path] | None) -> _Job:
    return _Job(_load_main(file, name), cells)


def _labelled(cfg: DictConfig) -> DictConfig:
    """``cfg`` with the ablation in its own key, which Hydra cannot set, as it is the name of a folder of configs."""
    for what in ("row", "column"):
        if cfg.get(what):
            cfg.ablation, cfg[what] = split_label(cfg[what])
    return cfg


def _launcher() -> str:
    """Package of the Hydra launcher whose job this process runs (``submitit``, ``ray``, …); empty for Hydra's own."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return ""
    package = re.match(r"hydra_plugins\.hydra_(\w+?)_launcher\.", HydraConfig.get().launcher._target_)
    return package[1] if package else ""


def _last_words(text: str) -> str:
    """What a failed job printed last, from submitit's report of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    return said[-1].removeprefix("error: ") if said else f"{lines[-1]} (its log is below OUTPUT/.jobs)"


def _stop(error: Exception, code: int = 2, what: str = "error") -> None:
    """Print the sentence and leave. What all processes see, all say; what one sees, no other can say."""
    text = str(error)
    if "Original Traceback" in text:  # torch wraps what a loader process raised
        text = text.strip().splitlines()[-1].split("UserError: ")[-1]
    ranks = (os.environ.get(name) for name in ("RANK", "SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID"))
    rank = next(filter(None, ranks), "0")
    who = what + ("" if rank == "0" else f" (process {rank})")
    print(f"{who}: {text}" if who else text, file=sys.stderr, flush=True)
    sys.exit(code)


def overrides() -> list[str]:
    """The overrides of the running tool's command line; none where Hydra did not start it."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def stored_config(stored: dict, configs: Path) -> DictConfig:
    """The configuration inside a checkpoint; keys that are younger than the checkpoint get their neutral values.

    Args:
        stored: as in the checkpoint. configs: folder of the configurations.
    """
    neutral = ["model=any", "augment=none", "optim=adamw", "engine=default"]
    running = GlobalHydra.instance().is_initialized()
    with nullcontext() if running else initialize_config_dir(str(configs), version_base="1.3"):
        base = compose("train", overrides=neutral)
    OmegaConf.set_struct(base, False)
    return OmegaConf.merge(base, stored)
