"""ViT³: vision test-time training. ``vit3.TTT`` is the mixer; ``import vit3`` also registers the models with timm."""

from importlib.util import find_spec

from vit3.mixers import TTT

__version__ = "0.1.0"
__all__ = ["TTT", "__version__", "create_model"]  # and predict, which comes when it is asked for

# The mixer needs torch alone; the networks are there where timm is.
if find_spec("timm"):
    from timm import create_model

    from vit3 import diffusion as diffusion
    from vit3 import models as models
else:

    def create_model(*args, **kwargs):
        """Stands for ``timm.create_model`` where timm is not installed."""
        raise ModuleNotFoundError("vit3.create_model needs timm: pip install timm")


def __getattr__(name: str):
    """``vit3.predict``, whose room needs Hydra and the configurations, which the mixer does not."""
    if name == "predict":
        from vit3.inference import predict

        return predict
    raise AttributeError(f"module 'vit3' has no attribute '{name}'")
