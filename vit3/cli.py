"""What every tool does around its work: check the command line, say errors in one sentence, end the processes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from vit3.config import known_keys, nearest
from vit3.engine.distributed import stop_processes
from vit3.errors import Interrupted, UserError

_FREE_KEYS = ("model.kwargs.",)  # below these, any key may be set

_MULTIRUN = ("-m", "--multirun")

# Our run folder holds everything, and our logging says it: Hydra writes no second folder and no log.
_QUIET = ("hydra.output_subdir=null", "hydra.run.dir=.", "hydra.job.chdir=false", "hydra/job_logging=none")


def run_tool(main: Callable[[DictConfig], None], *, config_name: str, schema: type, configs: Path) -> None:
    """Run ``main`` with the configuration that the command line composes.

    Args:
        main: gets the composed configuration. config_name: root file in ``configs``. schema: its dataclass.
        configs: folder of the configurations.
    """
    try:
        checked = [_checked(argument, schema, configs) for argument in sys.argv[1:]]
        sys.argv[1:] = [*sorted(checked, key=lambda a: a not in _MULTIRUN), *_QUIET]  # Hydra wants that flag first
    except UserError as error:
        _stop(error)
    hydra.main(version_base="1.3", config_path=str(configs), config_name=config_name)(_guarded(main))()


def _guarded(main: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    def guarded(cfg: DictConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
        try:
            main(cfg)
        except UserError as error:
            _stop(error)
        except Interrupted as stop:
            _stop(stop, stop.code, "")
        except KeyboardInterrupt:
            _stop(UserError("stopped; resume=RUN_FOLDER goes on from its last checkpoint, if there is one"), code=130)
        finally:
            stop_processes()

    return guarded


def _stop(error: Exception, code: int = 2, what: str = "error") -> None:
    """Print the sentence and leave. What all processes see, all say; what one sees, no other can say."""
    text = str(error)
    if "Original Traceback" in text:  # torch wraps what a loader process raised
        text = text.strip().splitlines()[-1].split("UserError: ")[-1]
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    who = what + ("" if rank == "0" else f" (process {rank})")
    print(f"{who}: {text}" if who else text, file=sys.stderr, flush=True)
    sys.exit(code)


def _checked(argument: str, schema: type, configs: Path) -> str:
    """One command-line argument, its key known to the schema; raises a UserError that names the nearest otherwise."""
    if argument.startswith("-"):
        return argument
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UserError(f"'{argument}' is no key=value ({str(error).splitlines()[0]})") from error
    if override.is_sweep_override() and not set(_MULTIRUN) & set(sys.argv):
        raise UserError(f"{argument} names several values; add -m for one run each, or write a list as key=[a,b]")
    key = override.key_or_group.lstrip("/")
    groups = {path.name for path in configs.iterdir() if path.is_dir()}
    if key.startswith("hydra") or override.is_delete():
        return argument
    if key.startswith(_FREE_KEYS):
        return argument if argument.startswith("+") else f"++{argument}"
    if key in groups and not override.is_sweep_override() and isinstance(override.value(), str):
        options = {path.stem for path in (configs / key).glob("*.yaml")}
        if override.value() not in options | {"null"}:
            raise UserError(f"{argument}: {nearest(override.value(), options)}")
    keys = set(known_keys(schema)) | (groups if "data" in known_keys(schema) else set())
    if key not in keys:
        raise UserError(f"{key} is no key of this program; {nearest(key, keys)}")
    return argument


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
