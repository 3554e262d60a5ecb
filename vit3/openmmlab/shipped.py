"""Where the configs lie that OpenMMLab's libraries bring along, for ``_base_ = "mmseg::..."``."""

from mmengine.config import utils


def find_shipped_configs() -> None:
    """Let MMEngine look for ``mmseg::`` by the name of the module; call it before a config is read.

    It looks for a distribution called mmsegmentation, and the maintained fork is called onedl-mmsegmentation. The
    module has the same name in both, and MMEngine takes it as well, as it does for mmdet. Twice is harmless.
    """
    utils.MODULE2PACKAGE["mmseg"] = "mmseg"
