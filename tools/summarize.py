"""The table of a sweep: ``python tools/summarize.py sweep=OUTPUT/sweeps/NAME``.

``sweeps=[A,B]`` makes several, ``output=runs ablation=NAME`` finds that of an ablation. Each gets table.md, table.csv,
cells.csv and table.png in its own folder, or with ``to=FOLDER`` in FOLDER/NAME. Nothing is computed again, and a sweep
may still be running.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from vit3.analysis.sweep_plots import plot_table
from vit3.analysis.sweep_table import read_table
from vit3.analysis.sweep_text import cells_csv, to_csv, to_markdown
from vit3.config import SummarizeConfig, typed
from vit3.errors import UserError
from vit3.files import replacing
from vit3.sweeps.sweep import Sweep

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.summarize")


def sweeps_of(arguments: list[str]) -> tuple[list[Sweep], str | None]:
    """The sweeps that a command line names, and the folder that their tables go to.

    Raises:
        UserError: no key=value, an unknown key, or no sweep is named.
    """
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"'{argument}' is no key=value; write sweep=OUTPUT/sweeps/NAME")
    defaults = {"sweep": None, "sweeps": [], "output": "runs", "ablation": None, "to": None}
    try:
        cfg = typed(OmegaConf.merge(defaults, OmegaConf.from_dotlist(arguments)), SummarizeConfig)
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from error
    paths = [Path(path) for path in [*([cfg.sweep] if cfg.sweep else []), *cfg.sweeps]]
    found = [Sweep(path) for path in paths]
    if cfg.ablation:
        found.append(Sweep.named(cfg.output, Path(cfg.ablation).stem))
    if not found:
        raise UserError("no sweep is named; give sweep=OUTPUT/sweeps/NAME, or output=OUTPUT ablation=NAME")
    return found, cfg.to


def summarize(sweep: Sweep, to: str | None = None) -> None:
    """Write the files of one sweep, into its folder or into one of its name below ``to``, and show its table."""
    table = read_table(sweep, CONFIGS)
    texts = {"table.md": to_markdown(table), "table.csv": to_csv(table), "cells.csv": cells_csv(table)}
    folder = sweep.path if to is None else Path(to) / sweep.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with replacing(folder / name) as file:
                file.write(text.encode())
        plot_table(table, folder / "table.png")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}); free space, or choose another to=FOLDER") from error
    logger.info(f"{texts['table.md']}\nwrote {', '.join([*texts, 'table.png'])} to {folder}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        sweeps, to = sweeps_of(sys.argv[1:])
        for sweep in sweeps:
            summarize(sweep, to)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
