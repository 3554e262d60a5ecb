"""Detections of single images: the pixels that training has, labels as drawing wants them."""

from __future__ import annotations

import numpy as np
import torch

from tests.detection.toy import small
from vit3.detection.predict import detect, instances


def test_images_are_scaled_as_in_training():
    model = small(box_score_thresh=0.0)
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    (found,) = detect(model.train(), [image], torch.device("cpu"))
    with torch.no_grad():
        (expected,) = model.eval()([torch.from_numpy(image / 255).float().permute(2, 0, 1)])
    assert len(found["scores"]) and all(torch.equal(found[name], value) for name, value in expected.items())


def test_labels_count_from_nought_and_masks_are_yes_or_no():
    masks = torch.tensor([0.4, 0.6]).reshape(1, 1, 1, 2)
    output = dict(
        boxes=torch.tensor([[1.0, 2, 3, 4]]), labels=torch.tensor([2]), scores=torch.tensor([0.5]), masks=masks
    )
    found = instances(output)
    assert found.labels.tolist() == [1] and found.masks.tolist() == [[[False, True]]] and found.scores.tolist() == [0.5]
    truth = instances(dict(boxes=output["boxes"], labels=output["labels"], masks=torch.tensor([[[0, 1]]])))
    assert truth.masks.tolist() == found.masks.tolist() and truth.scores is None
