"""What is exported: a network and all that its users have to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

KINDS = ("classifier", "features", "generator")


@dataclass(frozen=True)
class Subject:
    """A network as it leaves.

    Attributes:
        model: in evaluation mode, on the CPU, in float32. kind: one of ``KINDS``.
        name: under which timm knows it, such as ``h_vit3_tiny``, ``h_vit3_tiny_dense`` or ``dit3_s_8``.
        kwargs: plain arguments (JSON) with which ``timm.create_model(name, **kwargs)`` builds it again.
        img_size: nominal (height, width) in pixels; of a generator in latent pixels.
        classes: names in the order of the labels, if they are known.
        preprocessing: ``mean``, ``std``, ``interpolation``, ``crop_pct``, ``crop_mode`` of the test images; empty for a
            generator.
        weights: ``raw`` or ``ema``, or ``stored`` where the file does not say.
        training: what was measured and how it was trained, for the model card; ``top1`` in per cent, and so on.
        source: ``file`` and ``sha256`` of the checkpoint.
    """

    model: nn.Module
    kind: str
    name: str
    kwargs: dict[str, Any]
    img_size: tuple[int, int]
    classes: tuple[str, ...] | None = None
    preprocessing: dict[str, Any] = field(default_factory=dict)
    weights: str = "stored"
    training: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def in_chans(self) -> int:
        """Channels of the images or latents."""
        return self.model.in_chans
