"""Take a trained network's inner training apart: ``python tools/probe.py checkpoint=runs/NAME``.

Scores the test images as trained and under every intervention of :mod:`vit3.analysis.interventions` and at other image
sizes; writes ``probe.md``, ``probe.csv`` and ``probe.png``. Keys stand in configs/probe.yaml.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from vit3.analysis.interventions import Intervention, Score, inner_of, intervened, interventions
from vit3.analysis.probe_report import plot_probe, probe_csv, probe_markdown
from vit3.build import Trained, build_eval_loader, build_trained
from vit3.cli import run_tool, stored_config
from vit3.config import ProbeConfig, typed
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.evaluate import evaluate
from vit3.errors import UserError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.probe")


def probe(cfg: DictConfig) -> None:
    """Score one checkpoint under every intervention."""
    options: ProbeConfig = typed(cfg, ProbeConfig)
    processes = start_processes(options.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.WARNING)
    trained = build_trained(options, partial(stored_config, configs=CONFIGS), processes)
    out = Path(options.output) if options.output else trained.path.parent / "probe"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={out} is not writable ({error}); choose another output=FOLDER") from error
    try:
        wanted = interventions(inner_of(trained.model))
    except ValueError as error:
        raise UserError(f"checkpoint={options.checkpoint}: {error}") from error
    scores = [score(trained, intervention, processes) for intervention in wanted]
    scores += [score(trained, _size(factor, trained), processes, factor) for factor in options.sizes]
    if not processes.main:
        return
    (out / "probe.md").write_text(probe_markdown(scores, trained.title), encoding="utf-8")
    (out / "probe.csv").write_text(probe_csv(scores), encoding="utf-8")
    plot_probe(scores, out / "probe.png", trained.title)
    logger.info(f"written      {out / 'probe.md'}, {out / 'probe.csv'}, {out / 'probe.png'}")


def score(trained: Trained, what: Intervention, processes: Processes, factor: float = 1.0) -> Score:
    """Top-1 and loss under one intervention, at ``factor`` times the trained image size."""
    cfg = copy.deepcopy(trained.cfg)
    cfg.data.img_size = [max(1, round(side * factor)) for side in cfg.data.img_size]
    loader = build_eval_loader(cfg, trained.images, processes, trained.batch)
    with intervened(trained.model, what.changes):
        found = evaluate(trained.model, loader, processes, amp=cfg.engine.amp, title=what.label)
    logger.info(f"{what.label:28} top-1 {found['top1']:6.2f} %, loss {found['loss']:.4f}")
    return Score(what, found["top1"], found["loss"])


def _size(factor: float, trained: Trained) -> Intervention:
    if not (isinstance(factor, (int, float)) and factor > 0):
        raise UserError(f"sizes: {factor} is not allowed; give factors of the trained image size, like sizes=[0.75,2]")
    height, width = (max(1, round(side * factor)) for side in trained.cfg.data.img_size)
    return Intervention("size", f"{height}x{width} pixels")


def main() -> None:
    run_tool(probe, config_name="probe", schema=ProbeConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
