"""Detect: ``python tools/det.py train|test|predict|flops CONFIG [key=value ...]``.

A CONFIG that ends in ``.py`` is trained by OpenMMLab (extra ``mm``), one that ends in ``.yaml`` by our own engine with
torchvision's detectors (extra ``det``). Keys that both know: output, name, resume, checkpoint, images, data_root,
device, seed, threshold and size; those of ``.yaml`` files stand in configs/detection/torchvision_base.yaml.
"""

from __future__ import annotations

from vit3.commands import run_commands

BACKENDS = {".py": "vit3.openmmlab.commands", ".yaml": "vit3.build.detection"}


def main() -> None:
    run_commands("tools/det.py", BACKENDS)


if __name__ == "__main__":
    main()
