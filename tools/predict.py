"""Tell the classes of images: ``python tools/predict.py checkpoint=runs/NAME a.png folder/ '*.jpg'``.

Prints the best classes of each image, and writes ``predictions.json`` and ``predictions.png``: the images with, beside
each, what the inner step changed where, block by block. Keys stand in configs/predict.yaml.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vit3.analysis.inner_maps import evenly_spaced, inner_maps
from vit3.analysis.prediction_sheet import Predicted, draw_predictions
from vit3.cli import run_command, run_tool
from vit3.config import PredictConfig, known_keys, typed
from vit3.data.image_files import named_images, read_image
from vit3.errors import UserError
from vit3.files import replacing
from vit3.inference import Prediction, Predictor, load_predictor
from vit3.mixers import TTT

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
logger = logging.getLogger("vit3.predict")


def run_predict(cfg: DictConfig) -> None:
    """Predict the classes of all images that can be read, print and write them."""
    options: PredictConfig = typed(cfg, PredictConfig)
    files = named_images(options.images)
    predictor = load_predictor(options.checkpoint, options.weights, options.device)
    out = Path(options.output)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output={out} is not writable ({error}); choose another output=FOLDER") from error
    logger.info(predictor.title)
    mixers = sum(isinstance(module, TTT) for module in predictor.model.modules())
    if options.blocks and options.sheet and not mixers:
        logger.info("the network has no TTT mixer, so the sheet shows no maps of an inner step")
    found, sheet, unreadable = _predicted(files, predictor, options, evenly_spaced(mixers, options.blocks))
    if not found:
        raise UserError(f"none of the {len(files)} images can be decoded; nothing is written")
    _show(found)
    report = {
        "checkpoint": options.checkpoint,
        "loaded": predictor.title,
        "predictions": [{"file": str(file), **dataclasses.asdict(prediction)} for file, prediction in found.items()],
        "unreadable": [str(file) for file in unreadable],
    }
    with replacing(out / "predictions.json") as file:
        file.write((json.dumps(report, indent=2) + "\n").encode())
    written = [out / "predictions.json"]
    if sheet:
        count = "" if len(sheet) == len(found) else f", {len(sheet)} of {len(found)} images"
        draw_predictions(sheet, out / "predictions.png", predictor.title + count)
        written.append(out / "predictions.png")
    logger.info("written      " + ", ".join(map(str, written)))
    if unreadable:
        raise UserError(f"{len(unreadable)} of {len(files)} images cannot be decoded and are left out (see above)")


def _predicted(
    files: Sequence[Path], predictor: Predictor, options: PredictConfig, blocks: Sequence[int]
) -> tuple[dict[Path, Prediction], list[Predicted], list[Path]]:
    """Predictions by file, what is drawn, and the files that cannot be decoded."""
    found, sheet, unreadable = {}, [], []
    for first in range(0, len(files), options.batch_size):
        images = {}
        for file in files[first : first + options.batch_size]:
            try:
                images[file] = read_image(file, predictor.mode)
            except UserError as error:
                logger.warning(error)
                unreadable.append(file)
        for inputs in predictor.inputs(list(images.values()), options.batch_size):
            best = predictor.ranked(predictor.logits(inputs), options.topk)
            found |= zip(images, best)
            if drawn := options.sheet - len(sheet):
                sheet += _drawn(predictor, inputs[:drawn], best, blocks)
    return found, sheet, unreadable


def _drawn(predictor: Predictor, inputs, best: Sequence[Prediction], blocks: Sequence[int]) -> list[Predicted]:
    maps = inner_maps(predictor.model, inputs, blocks)
    return [
        Predicted(pixels, b.classes[0], b.probabilities[0], {m.block: m.values[i].numpy() for m in maps})
        for i, (pixels, b) in enumerate(zip(predictor.pixels(inputs), best))
    ]


def _show(found: dict[Path, Prediction]) -> None:
    """A table in a terminal; elsewhere a line for each class: file, class, probability, with tabs between."""
    rows = [(file, *ranked) for file, p in found.items() for ranked in zip(p.classes, p.probabilities)]
    if not sys.stdout.isatty():
        for file, name, probability in rows:
            print(f"{file}\t{name}\t{probability:.4f}")
        return
    table, before = Table("image", "class", "probability", box=None), None
    for file, name, probability in rows:
        table.add_row("" if file == before else escape(str(file)), escape(name), f"{100 * probability:6.2f} %")
        before = file
    Console().print(table)


def with_images(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the bare words among them, which name images, in one ``images=[...]``.

    A word is bare where it has no ``=``, or where it is the name of a file or folder and does not start with a key.

    Raises:
        UserError: there are bare words, and images=[...] too.
    """
    keys = tuple(f"{key}=" for key in known_keys(PredictConfig))
    bare = [
        word for word in arguments
        if not word.startswith(("-", *keys)) and ("=" not in word or Path(word).exists())
    ]  # fmt: skip
    if not bare:
        return list(arguments)
    rest = [word for word in arguments if word not in bare]
    if any(word.startswith("images=") for word in rest):
        raise UserError(f"{bare[0]} and images=[...] both name images; write all in one way")
    quoted = (QuotedString(word.replace("${", "\\${"), Quote.single).with_quotes() for word in bare)
    return [*rest, f"images=[{','.join(quoted)}]"]


def _start() -> None:
    sys.argv[1:] = with_images(sys.argv[1:])
    run_tool(run_predict, config_name="predict", schema=PredictConfig, configs=CONFIGS)


def main() -> None:
    run_command(_start)  # which says what is wrong with bare words


if __name__ == "__main__":
    main()
