"""scripts/make_toy_data.py: files of both formats as other readers see them, and what makes them worth testing with."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
from PIL import Image

from tests.data.test_scripts import run, script
from vit3.data.scenes import THINGS, draw_scene
from vit3.data.textures import TEXTURES, texture

SIZES = ("--train", 14, "--val", 12, "--size", 64)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy") / "data"
    with pytest.MonkeyPatch.context() as patch:
        run("make_toy_data", patch, out, *SIZES)
    return out


def annotations(toy, split):
    return json.loads((toy / "coco" / "annotations" / f"instances_{split}2017.json").read_text())


def filled(annotation, shape):
    """Mask [H, W] of a segmentation by means that the writer does not share: a loop, and Pillow's polygons."""
    from PIL import ImageDraw

    segmentation = annotation["segmentation"]
    if isinstance(segmentation, dict):
        flat = []
        for i, count in enumerate(segmentation["counts"]):
            flat += [i % 2] * count
        return np.array(flat, bool).reshape(shape[::-1]).T
    image = Image.new("1", (8 * shape[1], 8 * shape[0]))
    for line in segmentation:
        ImageDraw.Draw(image).polygon([8 * value for value in line], fill=1)
    return np.asarray(image, float).reshape(shape[0], 8, shape[1], 8).mean((1, 3)) > 0.5


def test_layout_and_what_it_says(toy):
    assert sorted(path.name for path in toy.iterdir()) == ["ade", "classes.json", "coco", "sheet.png"]
    names = json.loads((toy / "classes.json").read_text())
    assert names["detection"] == list(THINGS) and names["segmentation"][-len(THINGS) :] == list(THINGS)
    for split, count in (("train", 14), ("val", 12)):
        content = annotations(toy, split)
        assert len(content["images"]) == count
        assert [c["name"] for c in content["categories"]] == names["detection"]
        for image in content["images"]:
            with Image.open(toy / "coco" / f"{split}2017" / image["file_name"]) as file:
                assert file.size == (image["width"], image["height"]) and file.width % 2 and file.height % 2
    for place, count in (("training", 14), ("validation", 12)):
        stems = [{p.stem for p in (toy / "ade" / kind / place).iterdir()} for kind in ("images", "annotations")]
        assert stems[0] == stems[1] and len(stems[0]) == count


def test_segmentations_boxes_and_areas_are_of_the_same_visible_pixels(toy):
    content = annotations(toy, "train")
    shapes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    forms, covered = set(), {i: np.zeros(shape, int) for i, shape in shapes.items()}
    for item in content["annotations"]:
        mask = filled(item, shapes[item["image_id"]])
        polygon = isinstance(item["segmentation"], list)
        forms.add((polygon, item["iscrowd"]))
        tolerance = 0.08 if polygon else 0  # of a small thing much is edge
        assert abs(mask.sum() - item["area"]) <= tolerance * item["area"]
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = [columns[0], rows[0], columns[-1] + 1 - columns[0], rows[-1] + 1 - rows[0]]
        assert np.abs(np.subtract(box, item["bbox"])).max() <= (1 if polygon else 0)
        if not polygon:
            covered[item["image_id"]] += mask
    assert forms == {(True, 0), (False, 0), (False, 1)}
    assert max(c.max() for c in covered.values()) == 1  # nobody owns a pixel twice


def test_pycocotools_reads_it(toy):
    pytest.importorskip("pycocotools", reason="needs the extra mm or det")
    from pycocotools.coco import COCO

    content = annotations(toy, "train")
    coco = COCO(str(toy / "coco" / "annotations" / "instances_train2017.json"))
    for item in content["annotations"]:
        mask = coco.annToMask(item).astype(bool)
        ours = filled(item, mask.shape)
        if isinstance(item["segmentation"], dict):
            assert (mask == ours).all()
        else:
            assert (mask & ours).sum() > 0.85 * (mask | ours).sum()


def test_what_real_sets_have(toy):
    train, val = annotations(toy, "train"), annotations(toy, "val")
    ids = [c["id"] for c in train["categories"]]
    assert ids == sorted(ids) and ids[-1] > len(ids)  # gaps
    for content in (train, val):
        full = {item["image_id"] for item in content["annotations"]}
        assert len(full) < len(content["images"])  # images with nothing
        assert any(item["iscrowd"] for item in content["annotations"])
    absent = ids[THINGS.index(script("make_toy_data").ABSENT)]
    assert absent in {a["category_id"] for a in train["annotations"]}
    assert {a["category_id"] for a in val["annotations"]} == set(ids) - {absent}
    assert not {i["id"] for i in train["images"]} & {i["id"] for i in val["images"]}
    first, second = ([(i["height"], i["width"]) for i in content["images"][:8]] for content in (train, val))
    assert first != second  # other scenes, not the same ones with other digits


def test_masks_count_from_one_and_zero_is_no_class(toy):
    names = json.loads((toy / "classes.json").read_text())["segmentation"]
    absent = names.index(script("make_toy_data").ABSENT) + 1
    for place, missing in (("training", set()), ("validation", {absent})):
        seen, strips = set(), 0
        for path in sorted((toy / "ade" / "annotations" / place).iterdir()):
            with Image.open(path) as image, Image.open(toy / "ade" / "images" / place / f"{path.stem}.jpg") as picture:
                mask = np.asarray(image)
                assert image.mode == "L" and image.size == picture.size
            seen |= set(np.unique(mask).tolist())
            strips += (mask == 0).any()
            assert (mask == 0).mean() < 0.35
        assert seen == set(range(len(names) + 1)) - missing and 0 < strips < 10


def test_a_mask_follows_its_scene():
    """A thing's label is where its pixels differ from the ground, and a covered thing shows what is left of it."""
    digits = np.full((1, 8, 8), 255, np.uint8)
    module = script("make_toy_data")
    overlaps = 0
    for seed in range(8):
        scene = draw_scene(np.random.default_rng(seed), 80, THINGS, digits, count=6)
        labels = module.labels(scene, None)
        total = np.sum([thing.mask for thing in scene.things], 0)
        assert total.max() <= 1
        assert ((labels > len(module.GROUNDS)) == (total == 1)).all()
        for thing in scene.things:
            assert (labels[thing.mask] == module.SEGMENTS.index(thing.name) + 1).all() and thing.mask.sum() >= 18
            overlaps += thing.outline is None and thing.name in ("disc", "square", "triangle", "star", "cross")
    assert overlaps > 3


def test_visible_pixels_have_the_colour_of_their_thing(monkeypatch):
    """With one colour a thing, its mask holds no pixel of another: who is painted last owns the pixel."""
    monkeypatch.setattr("vit3.data.scenes.texture", lambda kind, size, step, turn: np.zeros(size, bool))
    digits = np.full((1, 8, 8), 255, np.uint8)
    for seed in range(12):
        scene = draw_scene(np.random.default_rng(seed), 80, ("disc", "square"), digits, count=6)
        for thing in scene.things:
            padded = np.pad(thing.mask, 2)
            height, width = thing.mask.shape
            inner = np.all([padded[i : i + height, j : j + width] for i in range(5) for j in range(5)], 0)
            values = scene.pixels[inner].astype(float)
            far = np.linalg.norm(values - np.median(values, 0), axis=1) > 50  # noise and light stay below
            assert not len(far) or far.mean() < 0.02


def test_same_seed_same_files_another_seed_others(toy, tmp_path, monkeypatch):
    module = script("make_toy_data")
    for sheet in ("_coco_sheet", "_ade_sheet"):  # a third of the time
        monkeypatch.setattr(module, sheet, lambda shown: Image.new("RGB", (9, 9)))
    module.write_data(tmp_path / "again", train=14, val=12, size=64, seed=0)
    module.write_data(tmp_path / "other", train=1, val=1, size=64, seed=1)
    files = sorted(path.relative_to(toy) for path in toy.rglob("*.*") if path.name != "sheet.png")
    assert len(files) == 3 * 26 + 3
    assert all((toy / path).read_bytes() == (tmp_path / "again" / path).read_bytes() for path in files)
    first = next(path for path in files if path.suffix == ".jpg")
    assert (toy / first).read_bytes() != (tmp_path / "other" / first).read_bytes()


def test_whole_or_not_at_all(tmp_path, monkeypatch, capsys):
    module = script("make_toy_data")
    monkeypatch.setattr(module, "_write_ade", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "out"), "--train", "1", "--val", "1", "--size", "64"])
    with pytest.raises(SystemExit):
        module.main()
    assert "disk full" in capsys.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / "mine.txt").write_text("")
    for arguments, words in (((tmp_path,), "is not empty"), ((tmp_path / "o", "--size", 20), "at least 64 pixels")):
        with pytest.raises(SystemExit):
            run("make_toy_data", monkeypatch, *arguments)
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_textures_repeat_after_their_period():
    for kind in TEXTURES:
        mask = texture(kind, (24, 36), 12.0, 0.0)
        assert (mask[:12] == mask[12:]).all() and (mask[:, :12] == mask[:, 12:24]).all()
    assert not texture("plain", (4, 4), 3.0, 0.5).any()
    stripes = texture("stripes", (24, 24), 12.0, 0.0)
    assert (stripes == stripes[:1]).all() and stripes[0, :6].all() and not stripes[0, 6:12].any()
    turned = texture("dots", (40, 40), 5.0, math.atan2(4, 3))  # periods end on pixels: 3, 4, 5
    assert (turned[4:, 3:] == turned[:-4, :-3]).all() and (turned[3:, :-4] == turned[:-3, 4:]).all()
    assert not (turned[3:, 4:] == turned[:-3, :-4]).all()
