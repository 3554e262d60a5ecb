"""Tools with several commands, ``TOOL COMMAND CONFIG [key=value ...]``, whose backend the file of CONFIG chooses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from vit3.cli import run_command
from vit3.config import nearest
from vit3.errors import UserError

COMMANDS = ("train", "test", "predict", "flops")
_EXTRAS = {"mmengine": "mm", "mmcv": "mm", "mmdet": "mm", "mmseg": "mm", "pycocotools": "det"}


def run_commands(tool: str, backends: Mapping[str, str]) -> None:
    """Run what the command line says; errors are said in one sentence.

    Args:
        tool: its name, as it is started. backends: by the ending of CONFIG the module whose functions, called as the
            commands, take (config: Path, arguments: list[str]).
    """
    run_command(lambda: _dispatch(tool, backends, sys.argv[1:]))


def _dispatch(tool: str, backends: Mapping[str, str], arguments: list[str]) -> None:
    usage = f"python {tool} {'|'.join(COMMANDS)} CONFIG [key=value ...], CONFIG ending in {' or '.join(backends)}"
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        raise UserError(f"{command} is no command of {tool}; {nearest(command, COMMANDS)}")
    if not rest or "=" in rest[0]:
        raise UserError(f"{tool} {command} needs a configuration file first: {usage}")
    config = Path(rest[0])
    if config.suffix not in backends:
        raise UserError(f"{config} must end in {' or '.join(backends)}, which says by what it is trained")
    if not config.is_file():
        raise UserError(f"{config}: no such configuration file; those that come along are in configs/")
    try:
        getattr(importlib.import_module(backends[config.suffix]), command)(config, rest[1:])
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        raise UserError(f"{config} needs {error.name}: pip install -e '.[{extra}]'") from error
