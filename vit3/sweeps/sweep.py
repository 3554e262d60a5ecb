"""A sweep: the list of its cells, in order, in a folder of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from vit3.errors import UserError
from vit3.files import replacing
from vit3.sweeps.cell import Cell, CellFolder


class Sweep:
    """OUTPUT/sweeps/NAME with ``sweep.json``: ``command``, ``ablation``, ``recipe``, ``code`` and ``cells``."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def name(self) -> str:
        """Of its folder, which a relative path such as ``.`` does not show."""
        return Path(os.path.abspath(self.path)).name

    @classmethod
    def named(cls, output: str | Path, name: str) -> Sweep:
        return cls(Path(output) / "sweeps" / name)

    def content(self) -> dict[str, Any]:
        """What ``sweep.json`` says.

        Raises:
            UserError: there is none.
        """
        try:
            content = json.loads((self.path / "sweep.json").read_text())
            _cells(content)
            return content
        except OSError as error:
            raise UserError(f"{self.path} holds no sweep.json; give OUTPUT/sweeps/NAME of a sweep") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path / 'sweep.json'} is damaged; remove it, and the command that made it lists its cells anew "
                "(what they have computed is kept)"
            ) from error

    def cells(self) -> list[Cell]:
        return _cells(self.content())

    @property
    def table_file(self) -> Path:
        """Copy of the ablation file, where that is not one of ours, which may be gone when the table is made."""
        return self.path / "ablation.yaml"

    def keep_file(self, path: Path) -> None:
        """Copy the ablation file of the user's that the sweep is of."""
        with replacing(self.table_file) as file:
            file.write(path.read_bytes())

    def folder(self, cell: Cell) -> CellFolder:
        """Where the numbers of one of its cells are, which other sweeps may share."""
        return CellFolder.of(os.path.normpath(self.path / ".." / ".."), cell.id)

    def extend(self, cells: Iterable[Cell], **facts: Any) -> None:
        """Add cells; one of the same row, column and seed takes the place of the old one: a table has each place once.

        Args:
            facts: further entries of ``sweep.json``.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / ".lock"):
                known = (self.path / "sweep.json").exists()
                before, listed = (self.content(), self.cells()) if known else ({}, [])
                listed = {(cell.row, cell.column, cell.seed): cell for cell in [*listed, *cells]}
                content = {**before, **facts, "cells": [cell.as_dict() for cell in listed.values()]}
                with replacing(self.path / "sweep.json") as file:
                    file.write((json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error}); choose another output=FOLDER") from error


def _cells(content: dict[str, Any]) -> list[Cell]:
    return [Cell(**{**cell, "overrides": tuple(cell["overrides"])}) for cell in content["cells"]]
