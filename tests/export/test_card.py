"""The model card, word for word: what a reader of the hub sees of a network."""

import dataclasses

from torch import nn

from vit3.export import Subject
from vit3.export.card import model_card

CONFIG = {
    "pretrained_cfg": {"license": "mit"},
    "sha256": "cd" * 32,
    "versions": {"vit3": "1.0", "timm": "2.0"},
}
CARD = """---
license: "mit"
library_name: timm
pipeline_tag: image-classification
tags:
- timm
- vit3
- test-time-training
- image-classification
datasets:
- "digits: ten"
---

# mine

Image classifier `vit3_tiny`: 2,002 parameters, 2 classes.

## Use

```python
import torch, vit3
model = vit3.create_model("local-dir:mine", pretrained=True).eval()
output = model(torch.randn(1, 4, 32, 48))
```

## Input

| | |
|---|---|
| channels | 4 |
| nominal size, pixels | 32 x 48 |
| mean | [0.5, 0.25] |
| crop_pct | 0.9 |

## Training and measured results

| | |
|---|---|
| top1 | 61.235 |
| note | a\\|b c |
| place | ["é", "PosixPath"] |

## Origin

| | |
|---|---|
| file | best.pt |
| weights | ema |
| SHA-256 of model.safetensors | cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd |
| vit3 | 1.0 |
| timm | 2.0 |

Source of the architecture: ViT³: Unlocking Test-Time Training in Vision, arXiv 2512.01643.
"""


class Word:
    """Something that JSON has no word for."""

    def __str__(self):
        return "PosixPath"


def subject(**changes):
    model = nn.Linear(1000, 2)
    model.in_chans = 4
    training = {"top1": 61.234567, "note": "a|b\nc", "place": ["é", Word()], "dataset": "digits: ten", "quoted": None}
    seen = {"mean": [0.5, 0.25], "crop_pct": 0.9}
    found = Subject(
        model, "classifier", "vit3_tiny", {}, (32, 48), ("a", "b"), seen, "ema", training, {"file": "best.pt"}
    )
    return dataclasses.replace(found, **changes)


def test_a_classifier():
    assert model_card(subject(), CONFIG, "mine") == CARD


def test_other_kinds_and_places():
    card = model_card(subject(kind="generator", classes=None, training={"quoted": {"FID": 2}}), CONFIG, "g", "me/net")
    assert "- image-generation\n---" in card and "datasets:" not in card and "## Training" not in card
    assert "Class-conditional denoiser of a diffusion model `vit3_tiny`: 2,002 parameters." in card
    assert 'create_model("hf-hub:me/net", pretrained=True)' in card and "pipeline_tag" not in card
    assert "model(torch.randn(1, 4, 32, 48), torch.tensor([500]), torch.tensor([0]))" in card
    assert "| nominal size, latent pixels | 32 x 48 |" in card
    assert "## Quoted, not measured here\n\n| | |\n|---|---|\n| FID | 2 |" in card
    card = model_card(subject(kind="features"), CONFIG, "b")
    assert "pipeline_tag: image-feature-extraction\n" in card and "Backbone that gives a map of each stage" in card
