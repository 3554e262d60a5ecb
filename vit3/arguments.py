"""The command line of a tool, checked before Hydra sees it: every key known, every mistake one sentence."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException

from vit3.config import known_keys, nearest
from vit3.errors import UserError

_FREE_KEYS = ("model.kwargs.", "mixer.kwargs.")  # below these, any key may be set

# An address with a checksum, which Hydra takes only in quotes of its own
_CHECKSUMMED = re.compile(r"^([\w.]+)=([^'\"\s]+#sha256=\w*)$")

MULTIRUN = ("-m", "--multirun")

# hydra/launcher=NAME: the package that has it, and our extra that installs it
_LAUNCHERS = {
    "slurm": ("hydra_submitit_launcher", "cluster"),
    "submitit_slurm": ("hydra_submitit_launcher", "cluster"),
    "submitit_local": ("hydra_submitit_launcher", "cluster"),
    "ray": ("hydra_ray_launcher", "ray"),
    "joblib": ("hydra_joblib_launcher", "joblib"),
}


def check_arguments(arguments: list[str], schema: type, configs: Path) -> list[str]:
    """``arguments`` as Hydra wants them: flags for many runs first, keys known to ``schema``.

    Args:
        schema: dataclass of the configuration. configs: folder of the configurations.

    Raises:
        UserError: no key=value, an unknown key (the nearest one is named), or a launcher that cannot start.
    """
    arguments = _without_local_rank(arguments)
    flags = [argument for argument in arguments if argument in MULTIRUN]
    rest = [argument for argument in arguments if argument not in MULTIRUN]
    return [*flags, *(_checked(argument, schema, configs, multirun=bool(flags)) for argument in rest)]


def _without_local_rank(arguments: list[str]) -> list[str]:
    """The arguments less ``--local-rank=N``, which old launchers pass instead of the variable LOCAL_RANK."""
    kept = []
    for argument in arguments:
        if rank := re.fullmatch(r"--local[-_]rank=(.*)", argument):
            os.environ.setdefault("LOCAL_RANK", rank[1])
        else:
            kept.append(argument)
    return kept


def _checked(argument: str, schema: type, configs: Path, *, multirun: bool) -> str:
    """One command-line argument, its key known to the schema; raises a UserError that names the nearest otherwise."""
    if argument.startswith("-"):
        return argument
    argument = _CHECKSUMMED.sub(r"\1='\2'", argument)
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UserError(f"'{argument}' is no key=value ({str(error).splitlines()[0]})") from error
    if override.is_sweep_override() and not multirun:
        raise UserError(f"{argument} names several values; add -m for one run each, or write a list as key=[a,b]")
    key = override.key_or_group.lstrip("/")
    if key == "recipe" and not override.is_sweep_override() and override.value() is None:
        return "recipe=[]"  # none, as Hydra says it on a command line
    if key == "hydra/launcher":
        _check_launcher(str(override.value()), multirun, configs)
    if key.split(".")[0].split("/")[0] == "hydra" or override.is_delete():
        return argument
    if key.startswith(_FREE_KEYS):
        return argument if argument.startswith("+") else f"++{argument}"
    groups = {path.name for path in configs.iterdir() if path.is_dir()} - {"hydra"}
    if key in groups and not override.is_sweep_override() and isinstance(override.value(), str | None):
        options = {path.stem for path in (configs / key).glob("*.yaml")}
        if override.value() not in options:
            raise UserError(f"{argument}: {nearest(str(override.value()), options)}")
    keys = set(known_keys(schema)) | (groups if "data" in known_keys(schema) else set())
    if key not in keys:
        raise UserError(f"{key} is no key of this program; {nearest(key, keys)}")
    return argument


def _check_launcher(name: str, multirun: bool, configs: Path) -> None:
    if not multirun:
        raise UserError(f"hydra/launcher={name} starts jobs only with -m; without it, the run would be here")
    if name not in (*_LAUNCHERS, "basic"):
        Plugins.instance()  # lets other packages say which they have
        options = {Path(option).stem for option in ConfigStore.instance().list("hydra/launcher")}
        options |= {path.stem for path in (configs / "hydra" / "launcher").glob("*.yaml")} | _LAUNCHERS.keys()
        if name not in options:
            raise UserError(f"hydra/launcher={name}: {nearest(name, options)}")
    module, extra = _LAUNCHERS.get(name, (None, None))
    if module and importlib.util.find_spec(f"hydra_plugins.{module}") is None:
        raise UserError(f"hydra/launcher={name} needs a package that is missing: pip install 'vit3[{extra}]'")
