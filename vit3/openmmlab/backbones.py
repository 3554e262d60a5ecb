"""The backbones and the pyramid, under their names in OpenMMLab's configs.

Registered once in MMEngine's root registry, where mmdet and mmseg both look. The networks are those of
:mod:`vit3.models`; here they only learn to be built from a config and to load weights as configs say it.
"""

from __future__ import annotations

import logging

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vit3.models import dense, pyramid
from vit3.models.weights import load_weights


class _FromConfig:
    """What a network gains: ``init_cfg``, read by our one loader.

    Args:
        init_cfg: ``dict(type="Pretrained", checkpoint=FILE)``: file of a classifier, detector or segmentor, ours or the
            authors', or any place of :func:`vit3.models.places.resolve`; ``ema=True`` takes its moving average.
            None keeps the fresh weights.
    """

    def __init__(self, *args, init_cfg: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)  # BaseModule's comes last but one, before nn.Module's
        self.init_cfg = init_cfg

    def init_weights(self) -> None:
        """Load what ``init_cfg`` names.

        Raises:
            ValueError: another kind of ``init_cfg``, a file that fits less than 95 % of it, or cannot be downloaded.
            FileNotFoundError: no such file.
        """
        if self.init_cfg is None:
            return
        given = dict(self.init_cfg)
        if given.pop("type", None) != "Pretrained" or "checkpoint" not in given or given.keys() - {"checkpoint", "ema"}:
            raise ValueError(
                f"init_cfg={dict(self.init_cfg)} must be dict(type='Pretrained', checkpoint=FILE[, ema=True]), or None"
            )
        place = given["checkpoint"]
        report = load_weights(self, place, ema=given.get("ema", False))
        print_log(f"{type(self).__name__}: {place}: {report}", logger="current", level=logging.INFO)


@MODELS.register_module()
class HViT3(_FromConfig, dense.DenseHViT3, BaseModule):
    """:class:`vit3.models.dense.DenseHViT3` for configs: ``dict(type="HViT3", arch="tiny")``, with ``init_cfg``."""


@MODELS.register_module()
class ViT3(_FromConfig, dense.DenseViT3, BaseModule):
    """:class:`vit3.models.dense.DenseViT3` for configs; one map, which ``SimpleFeaturePyramid`` makes into several."""


@MODELS.register_module()
class TimmBackbone(_FromConfig, dense.TimmMaps, BaseModule):
    """:class:`vit3.models.dense.TimmMaps`, any timm model: ``dict(type="TimmBackbone", model_name=NAME)``."""


@MODELS.register_module()
class SimpleFeaturePyramid(pyramid.SimpleFeaturePyramid, BaseModule):
    """:class:`vit3.models.pyramid.SimpleFeaturePyramid` for configs: the neck of plain networks."""

    def __init__(self, *args, init_cfg: None = None, **kwargs):
        super().__init__(*args, **kwargs)
