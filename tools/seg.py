"""Segment: ``python tools/seg.py train|test|predict|flops CONFIG [key=value ...]``, by OpenMMLab (extra ``mm``).

CONFIG is a file of MMEngine's, such as those in configs/segmentation/; besides its keys there are those of
``vit3/openmmlab/settings.py``.
"""

from __future__ import annotations

from vit3.commands import run_commands

BACKENDS = {".py": "vit3.openmmlab.commands"}


def main() -> None:
    run_commands("tools/seg.py", BACKENDS)


if __name__ == "__main__":
    main()
