"""The backbones and the pyramid, under their names in OpenMMLab's configs.

Registered once in MMEngine's root registry, where mmdet and mmseg both look. The networks are those of
:mod:`vit3.models`; here they only learn to be built from a config and to load weights as configs say it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS

from vit3.inner.spec import InnerSpec
from vit3.models import dense, pyramid
from vit3.models.dense import MapBackbone
from vit3.models.published import fetch
from vit3.models.weights import load_weights


class _FromConfig(BaseModule):
    """A network whose ``init_cfg`` may name a file of weights, read by our one loader.

    Args:
        init_cfg: ``dict(type="Pretrained", checkpoint=FILE)``: a file of a classifier, detector or segmentor, ours or
            the authors'; or the name of a published model, which is downloaded. ``ema=True`` takes its moving average.
    """

    network: type[MapBackbone]

    def __init__(self, *args, init_cfg: dict | None = None, **kwargs):
        if isinstance(inner := (kwargs.get("mixer_kwargs") or {}).get("inner"), dict):
            kwargs["mixer_kwargs"] = {**kwargs["mixer_kwargs"], "inner": InnerSpec.of(inner)}
        self.network.__init__(self, *args, **kwargs)
        # what BaseModule's constructor sets; it would run nn.Module's again
        self._is_init, self.init_cfg = False, init_cfg

    def init_weights(self) -> None:
        """Load what ``init_cfg`` names, once; without it the constructor's fresh weights stay.

        Raises:
            ValueError: another ``init_cfg``, or a file that fits less than 95 % of the network.
            FileNotFoundError: no such file.
        """
        if self._is_init or self.init_cfg is None:
            return
        given = dict(self.init_cfg)
        if given.pop("type", None) != "Pretrained" or "checkpoint" not in given or given.keys() - {"checkpoint", "ema"}:
            raise ValueError(
                f"init_cfg={dict(self.init_cfg)} must be dict(type='Pretrained', checkpoint=FILE[, ema=True]), or None"
            )
        file = fetch(given["checkpoint"]) if given["checkpoint"] in PUBLISHED else Path(given["checkpoint"])
        report = load_weights(self, file, ema=given.get("ema", False))
        print_log(f"{file}: {report}", logger="current", level=logging.INFO)
        self._is_init = True
