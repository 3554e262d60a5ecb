"""Write small data in the formats of COCO and ADE20K: ``python scripts/make_toy_data.py OUT``.

    OUT/coco/{train2017,val2017}/*.jpg   OUT/coco/annotations/instances_{train,val}2017.json
    OUT/ade/images/{training,validation}/*.jpg   OUT/ade/annotations/{training,validation}/*.png
    OUT/classes.json   OUT/sheet.png (some pictures with their annotations)

The pictures are scenes of vit3/data/scenes.py: shapes and scanned digits that cover each other, on textured grounds. As
in the real sets there are odd sizes, gaps in category and image ids, polygons where one line bounds a thing and run
lengths where not, crowds (``iscrowd``), images with nothing, a class that never occurs in validation, and masks whose 0
is no class (strips at a side), so that classes count from 1. Validation has other scenes and other people's digits.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from vit3.analysis.dense_plots import Instances, plot_class_maps, plot_detections
from vit3.data.digits import Digits
from vit3.data.scenes import GROUNDS, THINGS, Scene, Thing, draw_scene

ABSENT = "crescent"  # never occurs in validation
CATEGORY_IDS = (1, 2, 4, 7, 8, 11, 13, 18)  # of THINGS, with gaps as COCO has them
SEGMENTS = (*GROUNDS, *THINGS)  # label in a mask = place here + 1; 0 is no class
_SHOWN = 9  # pictures of each kind on the sheet


def encode(mask: np.ndarray) -> dict:
    """COCO's uncompressed run lengths of a mask [H, W]: zeros, ones, zeros … down the columns."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    starts = [0, *([0] if flat[0] else []), *changes.tolist(), len(flat)]
    return {"counts": np.diff(starts).tolist(), "size": list(mask.shape)}


def annotation(thing: Thing) -> dict:
    """Box, area and segmentation of one thing, of what is visible."""
    rows, columns = np.flatnonzero(thing.mask.any(1)), np.flatnonzero(thing.mask.any(0))
    box = [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]]
    if thing.outline is None:
        segmentation = encode(thing.mask)
    else:
        segmentation = [[round(float(value), 2) for value in thing.outline.ravel()]]
    return {
        "category_id": CATEGORY_IDS[THINGS.index(thing.name)],
        "bbox": [float(value) for value in box],
        "area": float(thing.mask.sum()),
        "iscrowd": int(thing.crowd),
        "segmentation": segmentation,
    }


def labels(scene: Scene, rng: np.random.Generator | None) -> np.ndarray:
    """Labels [H, W], uint8, of a scene; with ``rng`` a strip at one side has none."""
    mask = (scene.ground + 1).astype(np.uint8)
    for thing in scene.things:
        mask[thing.mask] = len(GROUNDS) + 1 + THINGS.index(thing.name)
    if rng is not None:
        side, width = rng.integers(4), rng.integers(5, 13)
        np.rot90(mask, side)[:width] = 0  # a view
    return mask


def write_data(out: Path, *, train: int, val: int, size: int, seed: int) -> None:
    """Write everything, whole or not at all.

    Args:
        out: must not exist or be empty. train, val: images of each format. size: about the shorter side, in pixels.
        seed: the same gives the same files.

    Raises:
        ValueError: numbers out of range, or a folder that holds something.
    """
    if min(train, val) < 1 or size < 64:
        raise ValueError(f"train={train}, val={val}, size={size}: at least 1 image, of at least 64 pixels")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        draft.chmod(0o755)
        sheets = []
        for split, count in (("train", train), ("val", val)):
            coco = _write_coco(draft / "coco", split, count, size, seed)
            ade = _write_ade(draft / "ade", split, count, size, seed)
            if split == "train":
                sheets = [_coco_sheet(coco[:_SHOWN]), _ade_sheet(ade[:_SHOWN])]
        names = {"detection": THINGS, "segmentation": SEGMENTS}
        (draft / "classes.json").write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
        _below_each_other(sheets).save(draft / "sheet.png")
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _scenes(form: int, split: str, count: int, size: int, seed: int):
    """Scenes of a format and split, one after the other, each from random numbers of its own."""
    names = [name for name in THINGS if split == "train" or name != ABSENT]
    digits = Digits(split).images
    for i in range(count):
        rng = np.random.default_rng([seed, form, split == "val", i])
        things = 0 if form == 0 and i % 17 == 5 else int(rng.integers(2, 7))
        yield i, rng, draw_scene(rng, size, names, digits, count=things, crowd=form == 0 and i % 12 == 7)


def _write_coco(root: Path, split: str, count: int, size: int, seed: int) -> list[Scene]:
    folder = root / f"{split}2017"
    folder.mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    images, annotations, scenes = [], [], []
    for i, _, scene in _scenes(0, split, count, size, seed):
        image = {"id": (100_000 if split == "val" else 0) + 7 * i + 9}
        image |= {"file_name": f"{image['id']:012d}.jpg"} | dict(zip(("height", "width"), scene.pixels.shape))
        Image.fromarray(scene.pixels).save(folder / image["file_name"], quality=92)
        images.append(image)
        for thing in scene.things:
            annotations.append({"id": 3 * len(annotations) + 1, "image_id": image["id"]} | annotation(thing))
        scenes.append(scene)
    categories = [
        {"id": k, "name": name, "supercategory": "digit" if name == "digit" else "shape"}
        for k, name in zip(CATEGORY_IDS, THINGS)
    ]
    content = {
        "info": {"description": f"generated by scripts/make_toy_data.py, seed {seed}"},
        "licenses": [],
        "images": images,
        "annotations": annotations,
        "categories": categories,
    }
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content), encoding="utf-8")
    return scenes


def _write_ade(root: Path, split: str, count: int, size: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    place = {"train": "training", "val": "validation"}[split]
    for kind in ("images", "annotations"):
        (root / kind / place).mkdir(parents=True)
    written = []
    for i, rng, scene in _scenes(1, split, count, size, seed):
        mask = labels(scene, rng if i % 4 == 1 else None)
        name = f"ADE_{split}_{i + 1:08d}"
        Image.fromarray(scene.pixels).save(root / "images" / place / f"{name}.jpg", quality=92)
        Image.fromarray(mask).save(root / "annotations" / place / f"{name}.png")
        written.append((scene.pixels, mask))
    return written


def _coco_sheet(scenes: list[Scene]) -> Image.Image:
    classes = [*THINGS, "crowd"]
    found = []
    for scene in scenes:
        boxes = [annotation(thing)["bbox"] for thing in scene.things]
        kinds = [classes.index("crowd" if thing.crowd else thing.name) for thing in scene.things]
        masks = np.array([thing.mask for thing in scene.things]).reshape(-1, *scene.pixels.shape[:2])
        found.append(Instances(np.array([(x, y, x + w, y + h) for x, y, w, h in boxes]), np.array(kinds), None, masks))
    pixels = [scene.pixels for scene in scenes]
    return _drawn(plot_detections, pixels, found, classes, "COCO format, training images")


def _ade_sheet(written: list[tuple[np.ndarray, np.ndarray]]) -> Image.Image:
    pixels, masks = zip(*written)
    shifted = [np.where(mask == 0, 255, mask.astype(int) - 1) for mask in masks]  # what reduce_zero_label does
    title = "ADE20K format, training images and their masks"
    return _drawn(plot_class_maps, pixels, shifted, SEGMENTS, title, note="mask")


def _drawn(draw, images, found, classes, title: str, **more: str) -> Image.Image:
    file = io.BytesIO()
    draw(images, found, classes, file, title, **more)
    return Image.open(file)


def _below_each_other(sheets: list[Image.Image]) -> Image.Image:
    page = Image.new("RGB", (max(s.width for s in sheets), sum(s.height for s in sheets)), "white")
    top = 0
    for sheet in sheets:
        page.paste(sheet, ((page.width - sheet.width) // 2, top))
        top += sheet.height
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write; it must not exist or be empty")
    for name, value, text in (
        ("train", 120, "training images of each format"),
        ("val", 40, "validation images of each format"),
        ("size", 128, "about the shorter side, in pixels"),
        ("seed", 0, "of all that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value} if nothing is said)")
    args = vars(parser.parse_args())
    try:
        write_data(args["out"], **{name: value for name, value in args.items() if name != "out"})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{args['train']:,} training and {args['val']:,} validation images of each format: {args['out']}")


if __name__ == "__main__":
    main()
