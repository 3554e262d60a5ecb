"""What model families share of timm's model contract: checkpointing; of classifiers also head, pooling, input size."""

from __future__ import annotations

import torch
from timm.models import checkpoint
from timm.models._input import update_model_input_size
from torch import Tensor, nn


class Blocks(nn.Module):
    """A network of blocks, which can be recomputed in the backward pass."""

    grad_checkpointing = False

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass: less memory, about a third more time."""
        self.grad_checkpointing = enable

    def _run(self, block: nn.Module, *inputs) -> Tensor:
        """One block on its inputs, recomputed in the backward pass if that is asked for."""
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint(block, *inputs)
        return block(*inputs)


class Backbone(Blocks):
    """Base of the classifiers. A subclass sets ``feature_info``, builds its trunk, calls :meth:`_finish`, and
    gives ``forward_features``, ``pool``, ``forward_intermediates``, ``prune_intermediate_layers``, ``group_matcher``.
    """

    def __init__(self, num_classes: int, in_chans: int, global_pool: str, drop_rate: float):
        super().__init__()
        if in_chans < 1:
            raise ValueError(f"in_chans={in_chans} must be at least 1")
        self.num_classes, self.in_chans = num_classes, in_chans
        self.global_pool = _checked_pool(global_pool)
        self.drop_rate = drop_rate

    def _finish(self, num_features: int) -> None:
        """Add the head and initialise all linear layers (truncated normal, std 0.02; biases zero)."""
        self.num_features = self.head_hidden_size = num_features
        self.head_drop = nn.Dropout(self.drop_rate)
        self.head = _linear_head(num_features, self.num_classes)
        self.apply(_init_linear)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names never decayed besides 1-D tensors: none. The paper's recipe does decay W1, W2 and W3."""
        return set()

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer (Identity with ``num_classes=0``)."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last layer by a fresh one for ``num_classes`` (0 for none)."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = _checked_pool(global_pool)
        old = next(self.parameters())
        self.head = _linear_head(self.num_features, num_classes).to(device=old.device, dtype=old.dtype)
        self.head.apply(_init_linear)

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Record the nominal image size that timm's data config reports; every size runs without rebuilding."""
        update_model_input_size(self, img_size)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features to logits (B, num_classes); with ``pre_logits`` to pooled features (B, C)."""
        if self.global_pool == "avg":
            x = self.pool(x)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W), of any size, to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def _check_image(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(
                f"images must be (B, {self.in_chans}, H, W): this model was built with in_chans={self.in_chans}; "
                f"got {tuple(x.shape)}"
            )


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Stochastic depth, growing linearly from 0 at the first block to ``rate`` at the last."""
    return torch.linspace(0, rate, depth, device="cpu").tolist()


def _checked_pool(global_pool: str) -> str:
    if global_pool not in ("avg", ""):
        raise ValueError(f"global_pool='{global_pool}' must be 'avg', or '' for unpooled features")
    return global_pool


def _linear_head(num_features: int, num_classes: int) -> nn.Module:
    if num_classes < 0:
        raise ValueError(f"num_classes={num_classes} must be 0 (no classifier) or more")
    return nn.Linear(num_features, num_classes) if num_classes > 0 else nn.Identity()


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
