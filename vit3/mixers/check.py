"""What every mixer demands of its arguments, said in one sentence each."""

from __future__ import annotations

from torch import Tensor


def head_dim(dim: int, num_heads: int) -> int:
    """Channels per head.

    Raises:
        ValueError: dim does not divide into num_heads heads.
    """
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise ValueError(f"dim={dim} must be a positive multiple of num_heads={num_heads}")
    return dim // num_heads


def check_tokens(x: Tensor, dim: int, h: int, w: int) -> None:
    """Make sure that x is (B, h*w, dim).

    Raises:
        ValueError: otherwise, with what was given and what is needed.
    """
    if x.ndim != 3:
        raise ValueError(f"x must be tokens (B, N, C); got {x.ndim} dimensions {tuple(x.shape)}")
    if x.shape[2] != dim:
        raise ValueError(f"x has {x.shape[2]} channels, but this mixer was built for dim={dim}")
    if x.shape[1] != h * w:
        raise ValueError(f"x has {x.shape[1]} tokens, but the grid h={h}, w={w} has {h * w}; pass the grid of x")
