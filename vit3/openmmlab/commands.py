"""The commands over MMEngine: train, test, predict and flops, each from a config file and ``key=value`` arguments."""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from mmengine.runner import Runner

from vit3.data.image_files import image_files
from vit3.engine.distributed import Processes, start_processes
from vit3.engine.run_folder import RunFolder
from vit3.engine.signals import StopRequest, stop_requests
from vit3.engine.trackers import Trackers, WandbTracker
from vit3.openmmlab.adapt import adapt, forget_pretrained, scale_learning_rate
from vit3.openmmlab.batch_one import let_single_values_pass
from vit3.openmmlab.before import before_first_step
from vit3.openmmlab.channels import check_channels
from vit3.openmmlab.checkpoints import RunCheckpoints, checkpoint_to_resume, checkpoint_to_use, keep_checkpoints
from vit3.openmmlab.files import use_safe_loader
from vit3.openmmlab.pictures import plot_validation
from vit3.openmmlab.predict import predict_images
from vit3.openmmlab.runner import StartWeights, WholeCheckpoint, build_runner, quietly
from vit3.openmmlab.runs import SCORES, RunFiles, RunRecorder, our_scores
from vit3.openmmlab.settings import Settings, read_settings

logger = logging.getLogger(__name__)


def train(config: Path, arguments: list[str]) -> None:
    """One training: ``output/name`` holds everything it leaves behind.

    Args:
        config: file of MMEngine's. arguments: ``key=value`` each, see :class:`vit3.openmmlab.settings.Options`.

    Raises:
        UserError: something that the user can mend. Interrupted: a signal asked to stop; everything is saved.
    """
    settings, processes = _start(config, arguments, "train")
    options = settings.options
    place = processes.on_main(lambda: checkpoint_to_resume(options.resume, options.output, options.name))
    with quietly():
        processes.on_main(lambda: before_first_step(settings.config))
    run = processes.on_main(lambda: _open_run(settings, config, place))
    logger.info("run folder   %s", run.path)
    derived = adapt(settings, str(run.path.resolve()), processes)
    facts = scale_learning_rate(derived, processes.world_size, options.scale_lr)
    score = keep_checkpoints(derived)
    if place is not None:
        derived.resume, derived.load_from = True, str(place)
        forget_pretrained(derived)
    with stop_requests() as stop, quietly():
        runner = build_runner(derived)
        let_single_values_pass(runner.model)
        check_channels(runner.model)
        if derived.get("load_from"):
            hook = WholeCheckpoint if place is not None else StartWeights
            runner.register_hook(hook(derived.load_from), priority="HIGHEST")
        recorder = _record(runner, run, facts | {"world_size": processes.world_size}, score, stop, settings, processes)
        _announce(runner, facts, processes, place)
        try:
            runner.train()
        finally:
            if recorder.tracker is not None:
                recorder.tracker.finish()
        if processes.main:
            _finish(runner, recorder, settings, config)


def test(config: Path, arguments: list[str]) -> dict[str, Any]:
    """The scores of a checkpoint on the validation data: the numbers that training logged.

    Args:
        config: file of MMEngine's, such as a run folder's ``config.py``. arguments: ``checkpoint=`` among them.

    Returns:
        The scores under their names in ``metrics.jsonl``, 0 to 1.
    """
    settings, processes = _start(config, arguments, "test")
    path = checkpoint_to_use(settings.options.checkpoint)
    with quietly():
        processes.on_main(lambda: before_first_step(settings.config, ("val_dataloader",)))
    with tempfile.TemporaryDirectory() as folder, quietly():
        derived = adapt(settings, folder, processes)
        derived.train_dataloader = derived.train_cfg = derived.optim_wrapper = derived.param_scheduler = None
        derived.load_from, derived.resume = str(path), False
        derived.default_hooks.pop("checkpoint", None)
        forget_pretrained(derived)
        runner = build_runner(derived)
        runner.register_hook(WholeCheckpoint(path))
        scores = our_scores(runner.val())
    logger.info("%s: %s", path, ", ".join(
        f"{label} {'undefined' if scores[key] is None else f'{100 * scores[key]:.1f} %'}"
        for key, label in SCORES.items() if key in scores
    ))  # fmt: skip
    _name_absent(runner)
    return scores


def predict(config: Path, arguments: list[str]) -> None:
    """Detections or class maps of ``images=``: sheets as PNG, and a JSON of COCO's results or PNG maps.

    Args:
        config: file of MMEngine's, such as a run folder's ``config.py``. arguments: ``checkpoint=`` and ``images=``
            among them; what is found is written to a folder below ``output``.
    """
    settings, processes = _start(config, arguments, "predict")
    options = settings.options
    path, images = checkpoint_to_use(options.checkpoint), image_files(options.images)
    if processes.main:
        target = RunFolder.create(options.output, options.name, f"predictions-{_name(config)}").path
        derived = adapt(settings, str(target), Processes(processes.device))
        forget_pretrained(derived)
        with quietly():
            predict_images(derived, path, images, target, processes.device, options.threshold)


def flops(config: Path, arguments: list[str]) -> None:
    """Parameters and multiply-adds of the model, part by part, at ``size=[height,width]`` or where papers count."""
    with quietly():
        settings = read_settings(config, arguments, "flops")
        show_cost = importlib.import_module("vit3.openmmlab.cost").show_cost  # needs mmdet and mmseg
    show_cost(settings.config, tuple(settings.options.size) if settings.options.size else None)


def _start(config: Path, arguments: list[str], command: str) -> tuple[Settings, Processes]:
    """Settings and processes; all but the main process keep quiet."""
    use_safe_loader()
    with quietly():  # the libraries print at import, here and where the data are looked at
        settings = read_settings(config, arguments, command)
        importlib.import_module("vit3.openmmlab.loops")  # registers
        if settings.config.default_scope == "mmseg":
            importlib.import_module("vit3.openmmlab.metrics")  # needs mmseg, which detection does not
    processes = start_processes(settings.options.device)
    if not processes.main:
        logging.getLogger().setLevel(logging.ERROR)  # what all processes derive, the main one says
    return settings, processes


def _open_run(settings: Settings, config: Path, place: Path | None) -> RunFiles:
    """The run folder: that of the checkpoint to resume, or a new one; the config is saved as composed."""
    options = settings.options
    if place is None:
        run = RunFiles.create(options.output, options.name, _name(config), again=options.resume == "auto")
    else:
        run = RunFiles(place.parent.parent)
    with run.writing():
        run.write_start(settings.config.pretty_text, [str(config), *options.given])
    return run


def _name(config: Path) -> str:
    """What a run of a config is called: the file, or where that is a run's own config, the run."""
    return config.resolve().parent.name if config.name == RunFiles.config_name else config.stem


def _record(
    runner: Runner,
    run: RunFiles,
    facts: dict[str, Any],
    score: str | None,
    stop: StopRequest,
    settings: Settings,
    processes: Processes,
) -> RunRecorder:
    options, tracker = settings.options, None
    if options.wandb and processes.main:
        tracker = Trackers([
            WandbTracker(mode=options.wandb, project=options.project, entity=options.entity, folder=str(run.path),
                         name=run.path.name, config=json.loads(json.dumps(settings.config.to_dict(), default=str)))
        ])  # fmt: skip
    named = next(iter(our_scores({score: 0.0})), None) if score else None
    checkpoints = lambda: next(hook for hook in runner.hooks if isinstance(hook, RunCheckpoints))  # noqa: E731
    hooks = settings.config.get("default_hooks") or {}
    every = (hooks.get("logger") or {}).get("interval", 50)
    recorder = RunRecorder(run, facts, named, stop, tracker, processes, checkpoints, every)
    runner.register_hook(recorder)
    return recorder


def _announce(runner: Runner, facts: dict[str, Any], processes: Processes, place: Path | None) -> None:
    parameters = sum(parameter.numel() for parameter in runner.model.parameters())
    logger.info("model        %s, %s parameters; device %s", runner.model_name, f"{parameters:,}", processes.device)
    if place is not None:
        logger.info("resumed      %s", place)


def _finish(runner: Runner, recorder: RunRecorder, settings: Settings, config: Path) -> None:
    """The sheet of validation images, and where everything is."""
    run, best = recorder.run, recorder.best()
    if runner.val_loop is not None:
        model = runner.model.module if hasattr(runner.model, "module") else runner.model
        title = f"{run.path.name}: weights of the last update"
        try:
            plot_validation(settings.config, model, runner.val_dataloader.dataset, run / "predictions.png", title,
                            settings.options.threshold)  # fmt: skip
        except OSError as error:  # the run is whole without it
            logger.warning("the sheet of predictions is lost (%s)", error)
        _name_absent(runner)
    if best is not None:
        logger.info("best         %s %.1f %% at update %d, epoch %d", SCORES.get(recorder.score, recorder.score),
                    100 * best[recorder.score], best["updates"], best["epoch"] + 1)  # fmt: skip
    tool = "seg" if settings.config.default_scope == "mmseg" else "det"
    logger.info(f"pictures     {run / 'curves.png'}, {run / 'predictions.png'}\n"
                f"evaluate     python tools/{tool}.py test {run / 'config.py'} checkpoint={run.path}")  # fmt: skip


def _name_absent(runner: Runner) -> None:
    """Say which classes have no true pixel in the validation data."""
    for metric in runner.val_evaluator.metrics:
        if absent := getattr(metric, "absent", None):
            logger.warning("classes without a pixel in the validation data, undefined and left out of the mean: %s",
                           ", ".join(absent))  # fmt: skip
