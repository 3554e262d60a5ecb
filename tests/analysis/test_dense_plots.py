"""Pictures of dense predictions: they show what was given, and text does not lie where it should not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from PIL import Image

from vit3.analysis import dense_plots, sheet
from vit3.analysis.class_colours import IGNORED, class_colours, ink_on, lab
from vit3.analysis.dense_plots import Instances, plot_class_maps, plot_detections, plot_scores

CLASSES = ("disc", "ring", "star")
IMAGE = np.full((60, 90, 3), 200, np.uint8)


@pytest.fixture
def figures(monkeypatch):
    """Figures that are drawn."""
    made = []
    for module in (sheet, dense_plots):
        original = module.new_figure
        monkeypatch.setattr(module, "new_figure", lambda *size, f=original: made.append(f(*size)) or made[-1])
    return made


def instances(scores=(0.9, 0.2, 0.5), masks=True):
    boxes = np.array([[5, 10, 30, 40], [40, 5, 60, 25], [50, 30, 85, 55]], float)
    found = np.zeros((3, 60, 90), bool)
    for mask, (left, top, right, bottom) in zip(found, boxes.astype(int)):
        mask[top:bottom, left:right] = True
    return Instances(boxes, np.array([0, 1, 2]), None if scores is None else np.array(scores), found if masks else None)


def rectangles(axes):
    return [
        (p.get_x(), p.get_y(), p.get_x() + p.get_width(), p.get_y() + p.get_height())
        for p in axes.patches
        if isinstance(p, Rectangle)
    ]


def notes(figure):
    return [text.get_text() for text in figure.texts]


def test_boxes_of_at_least_the_threshold(figures, tmp_path):
    plot_detections([IMAGE], [instances()], CLASSES, tmp_path / "x.png", "title", threshold=0.4)
    (figure,) = figures
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {"disc 0.90", "star 0.50"}
    assert sorted(rectangles(axes)) == [(5, 10, 30, 40), (50, 30, 85, 55)]
    assert notes(figure) == ["title", "found: 2 (score ≥ 0.4)"]
    assert Image.open(tmp_path / "x.png").size[0] > 500  # one picture is drawn large


def test_masks_have_the_colours_of_their_classes(figures, tmp_path):
    plot_detections([IMAGE], [instances()], CLASSES, tmp_path / "x.png", "t", threshold=0.0)
    veil = np.asarray(figures[0].axes[0].images[1].get_array())
    for label, (row, column) in enumerate(((20, 10), (10, 50), (40, 60))):
        assert np.allclose(veil[row, column, :3], class_colours(3)[label] / 255) and 0.2 < veil[row, column, 3] < 0.7
    assert (veil[0, 0] == 0).all() and (veil[..., 3] > 0).sum() == instances().masks.sum()
    plot_detections([IMAGE], [instances(masks=False)], CLASSES, tmp_path / "x.png", "t")
    assert len(figures[1].axes[0].images) == 1


def test_contours_lie_on_the_edges_of_masks(figures, tmp_path):
    plot_detections([IMAGE], [instances((0.9, 0.0, 0.0))], CLASSES, tmp_path / "x.png", "t")
    (contour,) = figures[0].axes[0].collections
    corners = np.concatenate([path.vertices for path in contour.get_paths()])
    assert np.abs(corners.min(0) - (5, 10)).max() <= 0.01 and np.abs(corners.max(0) - (30, 40)).max() <= 0.01


def test_truth_is_to_the_left_of_what_is_found(figures, tmp_path):
    images = [IMAGE, IMAGE[:33, :31]]
    nothing = Instances(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0), np.zeros((0, 33, 31), bool))
    plot_detections(images, [instances(), nothing], CLASSES, tmp_path / "x.png", "t", [instances(None), nothing])
    assert notes(figures[0])[1:] == ["truth: 3", "found: 2 (score ≥ 0.3)", "truth: 0", "found: 0 (score ≥ 0.3)"]
    first, second = figures[0].axes[:2]
    assert {text.get_text() for text in first.texts} == set(CLASSES) and len(second.texts) == 2
    assert first.get_position().x1 < second.get_position().x0


def shapes(count):
    rng = np.random.default_rng(count)
    return [np.zeros((*rng.integers(20, 200, 2), 3), np.uint8) for _ in range(count)]


@pytest.mark.parametrize(
    "images",
    [shapes(1), shapes(5), shapes(9), [np.zeros((20, 400, 3), np.uint8)], 3 * [np.zeros((200, 40, 3), np.uint8)]],
)
def test_pictures_keep_their_form_and_nothing_overlaps(figures, tmp_path, images):
    maps = [np.zeros(image.shape[:2], int) for image in images]
    names = [f"a class of some length {i}" for i in range(30)]
    maps[0].ravel()[:30] = range(30)
    plot_class_maps(images, maps, names, tmp_path / "x.png", "title\nsecond line", truth=maps)
    figure = figures[0]
    size = figure.get_size_inches()
    assert len(figure.axes) == 3 * len(images)
    for axes, image in zip(figure.axes, [image for image in images for _ in range(3)]):
        width, height = axes.get_position().size * size
        assert width / height == pytest.approx(image.shape[1] / image.shape[0], rel=1e-6)
    renderer = figure.canvas.get_renderer()
    pictures = [axes.get_window_extent(renderer) for axes in figure.axes]
    texts = [text.get_window_extent(renderer) for text in figure.texts]
    page = figure.bbox
    for box in (*pictures, *texts):
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
    for i, box in enumerate(pictures):
        assert not any(box.overlaps(other) for other in (*pictures[:i], *texts))
    for i, box in enumerate(texts):
        assert not any(box.overlaps(other) for other in texts[:i])


def test_labels_at_boxes_stay_in_the_picture_and_apart(figures, tmp_path):
    boxes = np.array([[0, 0, 20, 20], [1, 0, 21, 21], [88, 1, 90, 20], [87, 50, 90, 60]], float)
    found = Instances(boxes, np.array([0, 1, 2, 0]), np.array([0.9, 0.8, 0.7, 0.6]))
    plot_detections([IMAGE], [found], CLASSES, tmp_path / "x.png", "t")
    (axes,) = figures[0].axes
    renderer = figures[0].canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    texts = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(texts) == 4
    for i, text in enumerate(texts):
        assert frame.x0 <= text.x0 and text.x1 <= frame.x1 and frame.y0 <= text.y0 and text.y1 <= frame.y1
        assert not any(text.overlaps(other) for other in texts[:i])


def test_maps_show_classes_and_ignored_pixels(figures, tmp_path):
    truth = np.zeros((60, 90), int)
    truth[:30] = 2
    truth[:, :10] = 255
    predicted = np.where(truth == 255, 1, truth)
    predicted[30:42, 10:] = 2  # 12 of 60 rows are wrong
    plot_class_maps([IMAGE], [predicted], CLASSES, tmp_path / "x.png", "t", [truth])
    figure = figures[0]
    colours = class_colours(3)
    shown = [np.asarray(axes.images[0].get_array()) for axes in figure.axes]
    assert (shown[0] == IMAGE).all()
    assert (shown[1][:, :10] == IGNORED).all() and (shown[1][40, 40:] == colours[0]).all()
    assert (shown[2][35, 40] == colours[2]).all() and (shown[2][50, 5] == colours[1]).all()
    assert notes(figure) == ["t", "image", "truth", "predicted, 80.0 % right", *CLASSES, "no class"]
    entries = [artist for artist in figure.artists + figure.patches if isinstance(artist, Rectangle)]
    faces = [tuple(np.rint(255 * np.array(entry.get_facecolor()[:3])).astype(int)) for entry in entries]
    assert faces == [*map(tuple, colours.tolist()), IGNORED]
    plot_class_maps([IMAGE], [np.zeros((60, 90), int)], CLASSES, tmp_path / "x.png", "t", note="mask")
    assert notes(figures[1]) == ["t", "image", "mask", "disc"]  # the legend holds what is seen


def test_refusals(tmp_path):
    target = tmp_path / "x.png"
    cases = [
        (lambda: plot_detections([], [], CLASSES, target, "t"), "no images to draw"),
        (lambda: plot_detections([IMAGE], [], CLASSES, target, "t"), "found has 0 entries for 1 images"),
        (lambda: plot_detections([IMAGE], [instances()], CLASSES[:2], target, "t"), "label 2 has no class; use 0 to 1"),
        (lambda: plot_class_maps([IMAGE], [np.full((60, 90), 7)], CLASSES, target, "t"), "label 7 has no class; use 0"),
        (
            lambda: plot_class_maps([IMAGE], [np.zeros((9, 9), int)], CLASSES, target, "t"),
            "is (9, 9), its image (60, 90)",
        ),
    ]
    for draw, words in cases:
        with pytest.raises(ValueError) as error:
            draw()
        assert words in str(error.value)
    assert not target.exists()


def test_scores_in_percent_over_epochs(figures, tmp_path):
    records = [{"epoch": e, "updates": 10 * e, "train/loss": 3.0 - e, "train/loss_cls": 1.0} for e in range(3)]
    records[1] |= {"val/bbox_AP50": 0.5, "val/segm_AP": float("nan")}
    records[2] |= {"val/bbox_AP50": 0.25, "val/segm_AP": 0.125}
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    scores = {"val/bbox_AP50": "box AP50", "val/segm_AP": "mask AP", "val/mIoU": "mIoU"}
    plot_scores(tmp_path / "m.jsonl", tmp_path / "x.png", "t", scores)
    left, right = figures[0].axes
    series = {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in (*left.lines, *right.lines)
    }
    assert series == {
        "training, sum": ([1, 2, 3], [3, 2, 1]),
        "cls": ([1, 2, 3], [1, 1, 1]),
        "box AP50": ([2, 3], [50, 25]),
        "mask AP": ([3], [12.5]),
    }
    note = right.get_title(loc="left")
    assert note == "box AP50: last 25.0, best 50.0 (epoch 2)\nmask AP: last 12.5, best 12.5 (epoch 3)"


def test_scores_over_updates_where_there_are_no_epochs(figures, tmp_path):
    records = [{"epoch": 0, "updates": u, "val/mIoU": u / 1000} for u in (100, 200)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    plot_scores(tmp_path / "m.jsonl", tmp_path / "x.png", "t", {"val/mIoU": "mIoU"})
    right = figures[0].axes[1]
    assert list(right.lines[0].get_xdata()) == [100, 200] and right.get_xlabel() == "updates"
    assert "best 20.0 (update 200)" in right.get_title(loc="left")


def test_one_epoch_without_success_is_drawn_from_zero(figures, tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps({"epoch": 0, "updates": 3, "train/loss": 2.0, "val/bbox_AP": 0.0}))
    plot_scores(tmp_path / "m.jsonl", tmp_path / "x.png", "t", {"val/bbox_AP": "box AP"})
    right = figures[0].axes[1]
    assert right.get_ylim() == (0, 1) and all(float(tick).is_integer() for tick in right.get_xticks())


@pytest.mark.parametrize(("count", "least"), [(12, 20), (150, 12)])
def test_colours_differ(count, least):
    places = lab(np.array([*class_colours(count), IGNORED, (255, 255, 255)]))
    distances = np.linalg.norm(places[:, None] - places, axis=-1) + 1e3 * np.eye(count + 2)
    assert distances.min() >= least
    assert (class_colours(count)[:5] == class_colours(5)).all() and len(class_colours(1203)) == 1203


def test_lab_of_known_colours():
    """White, black and sRGB red, whose L*a*b* is 53.24, 80.09, 67.20."""
    known = lab(np.array([[255, 255, 255], [0, 0, 0], [255, 0, 0]]))
    assert np.allclose(known, [[100, 0, 0], [0, 0, 0], [53.24, 80.09, 67.20]], atol=0.05)
    assert (ink_on(np.array([255, 240, 90])), ink_on(np.array([20, 20, 120]))) == ("black", "white")
