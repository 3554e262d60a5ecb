"""ViT³ in OpenMMLab: ``custom_imports = dict(imports=["vit3.openmmlab"])`` in a config is all that is needed.

An mmcv without compiled operators gets those of torchvision first; then backbones and neck are registered.
"""

from importlib.util import find_spec

if not find_spec("mmengine"):
    raise ModuleNotFoundError("vit3.openmmlab needs OpenMMLab: pip install 'vit3[mm]'", name="mmengine")

from vit3.openmmlab.ops import install

install()  # before anything of mmcv.ops is imported

from vit3.openmmlab.backbones import HViT3, SimpleFeaturePyramid, TimmBackbone, ViT3  # noqa: E402
from vit3.openmmlab.shipped import find_shipped_configs  # noqa: E402

find_shipped_configs()

__all__ = ["HViT3", "SimpleFeaturePyramid", "TimmBackbone", "ViT3", "install"]
