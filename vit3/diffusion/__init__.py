"""Diffusion: what noise is added, what is learnt of it, and how images are drawn with that; knows no file or config."""

from vit3.diffusion.flow import RectifiedFlow
from vit3.diffusion.gaussian import GaussianDiffusion
from vit3.diffusion.guidance import guided
from vit3.diffusion.samplers import SAMPLERS, Sampler

__all__ = ["SAMPLERS", "GaussianDiffusion", "RectifiedFlow", "Sampler", "guided"]
