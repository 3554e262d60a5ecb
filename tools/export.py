"""Write a network in other formats and compare each with it: ``python tools/export.py checkpoint=runs/NAME``."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from omegaconf import DictConfig

from vit3.build import build_subject
from vit3.cli import run_tool, stored_config
from vit3.config import ExportConfig, nearest, typed
from vit3.errors import Interrupted, UserError
from vit3.export import Subject
from vit3.export.aoti import DEVICES
from vit3.export.formats import FORMATS, export
from vit3.export.onnx import DTYPES
from vit3.export.report import Result, figure, write_report
from vit3.export.signature import Signature
from vit3.models.places import CONFIG, FOLDER

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.export")


def run_export(cfg: DictConfig) -> None:
    """Write all formats; the report says what was compared, the exit status whether all of it holds."""
    options: ExportConfig = typed(cfg, ExportConfig)
    _check(options)
    options.checkpoint = options.checkpoint.removeprefix(FOLDER)
    subject = build_subject(options, partial(stored_config, configs=CONFIGS))
    try:
        signature = Signature.of(subject, tuple(options.dynamic))
        signature.in_steps(options.multiple)
    except ValueError as error:
        raise UserError(str(error)) from error
    folder = _folder(options)
    logger.info("%s (%s weights of %s) to %s", subject.name, subject.weights, subject.source.get("file"), folder)
    results: list[Result] = []
    how = {name: getattr(options, name) for name in ("dtype", "device", "multiple", "license", "push")}
    try:
        for result in export(subject, options.format, signature, folder, **how):
            results.append(result)
            _report(folder, subject, results)  # after each, for some take an hour
            logger.info("%s", describe(result))
    except KeyboardInterrupt:
        raise Interrupted("stopped; the formats that are there are whole", 130) from None
    logger.info("report: %s", folder / "export.md")
    if failed := [result.format for result in results if not result.passed]:
        raise UserError(f"not verified: {', '.join(failed)}; {folder / 'export.md'} says what was found")


def describe(result: Result) -> str:
    """One line about a format."""
    if result.error is not None:
        return f"{result.format:12} {'not compared' if result.files else 'not written'}: {result.error}"
    kind = "equal" if result.passed else "NOT equal"
    return (
        f"{result.format:12} {result.files[0].name}: {kind}, {len(result.checks)} comparisons, largest difference "
        f"{figure(result.difference)}, written in {result.seconds:.0f} s"
    )


def _check(options: ExportConfig) -> None:
    """Raise a UserError for formats that are none, and for options that none of the formats heeds."""
    if not options.format:
        raise UserError(f"format=[] writes nothing; name some of: {', '.join(FORMATS)}")
    for name in options.format:
        if name not in FORMATS:
            raise UserError(f"format={name} is not allowed; {nearest(name, FORMATS)}")
    if len(set(options.format)) < len(options.format):
        raise UserError(f"format=[{','.join(options.format)}] names one twice; name each once")
    for key, allowed in (("device", DEVICES), ("dtype", DTYPES)):
        if (value := getattr(options, key)) not in allowed:
            raise UserError(f"{key}={value} is not allowed; {nearest(value, allowed)}")
    if options.push and "safetensors" not in options.format:
        raise UserError(f"push={options.push} uploads the hub folder; add safetensors to format")
    if options.push and (options.push.count("/") != 1 or not all(options.push.split("/"))):
        raise UserError(f"push={options.push} must be OWNER/NAME")
    for key, neutral, name in (("dtype", "float32", "onnx"), ("device", "cpu", "aoti"), ("multiple", 1, "aoti")):
        if (value := getattr(options, key)) != neutral and name not in options.format:
            raise UserError(f"{key}={value} is of {name} alone; add {name} to format, or leave {key} out")


def _report(folder: Path, subject: Subject, results: list[Result]) -> None:
    try:
        write_report(folder, subject, results)
    except OSError as error:
        raise UserError(f"output={folder}: the report cannot be written ({error}); make room, or choose another "
                        "output=FOLDER") from error  # fmt: skip


def _folder(options: ExportConfig) -> Path:
    place = Path(options.checkpoint)
    if (place.parent / CONFIG).is_file():  # the weights of a hub folder
        place = place.parent
    run = place.is_dir() and not (place / CONFIG).is_file()  # into a hub folder nothing else is written
    beside = place if run else place.parent if place.exists() else Path()
    folder = Path(options.output) if options.output else beside / "export"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={folder} is not writable ({error}); choose another output=FOLDER") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"output={folder} is not writable; choose another output=FOLDER")
    return folder


def main() -> None:
    run_tool(run_export, config_name="export", schema=ExportConfig, configs=CONFIGS)


if __name__ == "__main__":
    main()
