"""ViT³ in OpenMMLab; importing it first gives an mmcv without compiled operators those of torchvision."""

from vit3.openmmlab.ops import install

install()
