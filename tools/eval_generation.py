"""Score generated images: ``python tools/eval_generation.py samples=FOLDER_OR_NPZ reference=FOLDER_OR_NPZ``.

FID, sFID, Inception Score, precision and recall in the features of the Inception network, or, with ``classifier=RUN``,
their counterparts in the features of a classifier of ours and the share of images that it takes for the class asked
for. Writes ``scores.json``, which says under which protocol they hold. Keys stand in configs/eval_generation.yaml.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console

from vit3.cli import run_tool, stored_config
from vit3.config import GenerationScoreConfig, typed
from vit3.engine.distributed import start_processes
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.eval_generation")


def eval_generation(cfg: DictConfig) -> None:
    """Score one set of images, print the report and write it."""
    options: GenerationScoreConfig = typed(cfg, GenerationScoreConfig)
    try:
        from vit3.generation.compared import open_reference, open_samples
        from vit3.generation.evaluation import score
        from vit3.generation.report import score_report, score_tables, write_report
    except ModuleNotFoundError as error:
        if error.name != "torch_fidelity":
            raise
        raise UserError("scores need torch-fidelity: pip install -e '.[gen]'") from error
    processes = start_processes(options.device)
    if processes.distributed:
        raise UserError(f"scores are computed in one process, not in {processes.world_size}; start it without torchrun")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.inception is not None and options.classifier is not None:
        raise UserError("inception and classifier are both given; choose in whose features images are compared")
    samples = open_samples(options.samples)
    output = _output(options)
    reference = None if options.reference is None else open_reference(options.reference)
    network = _network(options, processes)
    numbers = dict(neighbours=options.neighbours, splits=options.splits)
    scores = score(
        samples, reference, network, options.metrics,
        batch_size=options.batch_size, device=processes.device, **numbers,
    )  # fmt: skip
    report = score_report(scores, samples, reference, network, **numbers)
    write_report(output, report)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in score_tables(report):
        console.print(table)
    logger.info("written      %s", output)


def _network(options: GenerationScoreConfig, processes):
    if options.classifier is not None:
        from vit3.build.scoring import build_classifier_features

        return build_classifier_features(options.classifier, partial(stored_config, configs=CONFIGS), processes)
    from vit3.generation.inception import load_inception

    return load_inception(options.inception, processes.device)


def _output(options: GenerationScoreConfig) -> Path:
    """Where the report goes; refused before the work, not after it."""
    place = Path(options.samples)
    if options.output is not None:
        path = Path(options.output)
    else:
        path = (place if place.is_dir() else place.parent) / "scores.json"
    if path.is_dir() or path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        raise UserError(f"output={path} is a folder or in one that is not writable; give output=FILE.json")
    if not path.parent.is_dir():
        raise UserError(f"output={path}: its folder is missing; make it, or give another output=FILE.json")
    return path


def main() -> None:
    run_tool(eval_generation, config_name="eval_generation", schema=GenerationScoreConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
