"""The run folder: everything a run leaves behind, and enough to repeat it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vit3.errors import UserError
from vit3.files import replacing

_OPENMMLAB = ("mmengine", "mmcv", "mmdet", "mmseg")  # known where they are used


class RunFolder:
    """Files of one run: configuration, environment, ``metrics.jsonl``, ``summary.json``, checkpoints and plots."""

    config_name = "config.yaml"

    def __init__(self, path: Path):
        self.path = path

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @classmethod
    def create(cls, output: str, name: str | None, default_name: str, again: bool = False) -> RunFolder:
        """Make a new folder below ``output``.

        Args:
            output: parent folder. name: its name; None takes ``default_name`` with the time.
            again: take a folder that holds a run, which stopped before its first checkpoint.

        Raises:
            UserError: not writable, ``name`` is no folder name, or holds a run already.
        """
        if name is not None and (Path(name).name != name or name in (".", "..")):
            raise UserError(f"name={name} must be one folder name; set the folder above it by output=FOLDER")
        path = Path(output) / (name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            if name is None:
                path = _make_free(path)
            elif (path / cls.config_name).exists() and not again:
                raise UserError(f"name={name}: {path} holds a run already; add resume={path}, or choose another name")
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".write-test"
            probe.write_text("ok")
            probe.unlink()
            (path / cls.config_name).unlink(missing_ok=True)  # of a try that came to nothing: this one may differ
        except OSError as error:
            raise UserError(f"output={output} is not writable ({error}); choose another output=FOLDER") from error
        return cls(path)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Context in which what the file system refuses is said in one sentence."""
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error}); free space and resume={self.path}") from error

    def write_start(self, config: str, overrides: list[str]) -> None:
        """Save the configuration as composed; add to ``environment.json`` where and how the run was (re)started."""
        starts = json.loads((self / "environment.json").read_text()) if (self / "environment.json").exists() else []
        if not (self / self.config_name).exists():
            (self / self.config_name).write_text(config)
        self.write_json("environment.json", [*starts, {"command": [sys.argv[0], *overrides], **environment()}])

    def write_json(self, name: str, value: Any) -> None:
        """Write ``value`` as JSON; the file is at any moment either the old or the whole new one."""
        with replacing(self / name) as file:
            file.write((json.dumps(value, indent=2) + "\n").encode())

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add one line of JSON to a file."""
        with open(self / name, "a") as file:
            file.write(json.dumps(line) + "\n")

    def rewind(self, epoch: int, updates: int, record: dict[str, Any] | None) -> None:
        """Make the numbers those of a run that has just reached ``epoch`` and ``updates``, after a stop at any moment.

        Lines of later epochs and updates go, for they will be written again; ``record``, the line of the epoch before,
        is added if the stop came between its checkpoint and its line.
        """
        lines = self._keep("metrics.jsonl", lambda line: line["epoch"] < epoch)
        self._keep("steps.jsonl", lambda line: line["updates"] <= updates)
        if record is not None and record["epoch"] not in {line["epoch"] for line in lines}:
            self.append("metrics.jsonl", record)

    def _keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop unwanted and half-written lines of a file, if it exists; returns the others."""
        if not (self / name).exists():
            return []
        lines = []
        for text in (self / name).read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # killed while writing
                continue
            if wanted(line):
                lines.append(line)
        with replacing(self / name) as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        return lines


def environment() -> dict[str, Any]:
    """Versions, machine and git commit, as far as they can be known."""
    import timm

    from vit3 import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "vit3": __version__,
        "commit": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        **{name: sys.modules[name].__version__ for name in _OPENMMLAB if name in sys.modules},
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git_commit() -> str | None:
    """Commit of the checkout that runs, with ``+changes`` where tracked files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def _make_free(path: Path) -> Path:
    """Make the folder ``path``, or path-2, path-3, … if another run took it in the same second."""
    candidate, number = path, 2
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            if not candidate.is_dir():  # a file in the place of its parent, too
                raise
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
