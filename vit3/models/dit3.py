"""DiT³, the generator: DiT's adaLN-Zero blocks with the TTT block as mixer and a 3x3 depthwise convolution before.

``forward(x, t, y)`` predicts, from a noisy image (or latent) of any size, its time and its class, the noise and, with
``learn_sigma``, where its variance lies. What is done with that, guidance included, is :mod:`vit3.diffusion`'s.
Source: paper table 13; DiT (2212.09748); the authors' code.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from timm.models import register_model
from torch import Tensor, nn

from vit3.layers.embed import LabelEmbed, SinCos2d, TimeEmbed
from vit3.layers.grid import crop, to_map, to_tokens
from vit3.mixers import create_mixer
from vit3.models.backbone import Blocks
from vit3.models.mlp import Mlp
from vit3.models.published import build_generator
from vit3.models.vit3 import PatchEmbed

LayerNorm = partial(nn.LayerNorm, elementwise_affine=False, eps=1e-6)
GeluTanh = partial(nn.GELU, approximate="tanh")


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Scale and shift the channels of all tokens of an image: x (B, N, C), shift and scale (B, C)."""
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Depthwise convolution, token mixer and feed-forward network, of which the last two are modulated by c.

    Args:
        cpe: whether the convolution is there; DiT has none.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float, mixer, mixer_kwargs: dict, cpe: bool = True):
        super().__init__()
        self.cpe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim) if cpe else None
        self.norm1 = LayerNorm(dim)
        self.attn = create_mixer(mixer, dim, num_heads, **mixer_kwargs)
        self.norm2 = LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=GeluTanh)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor, h: int, w: int) -> Tensor:
        """Tokens x (B, h*w, C), condition c (B, C)."""
        if self.cpe is not None:
            x = x + to_tokens(self.cpe(to_map(x, h, w)))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)  # each (B, C)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1), h, w)
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class FinalLayer(nn.Module):
    """Modulated norm, then a linear layer to the pixels of each patch."""

    def __init__(self, dim: int, patch_size: int, out_chans: int):
        super().__init__()
        self.norm_final = LayerNorm(dim)
        self.linear = nn.Linear(dim, patch_size**2 * out_chans)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT3(Blocks):
    """Class-conditional denoiser for images or latents of any size and aspect ratio.

    With ``mixer="softmax"`` and ``cpe=False`` it is DiT itself.

    Args:
        patch_size: side of a patch, in latent pixels.
        in_chans: channels of the latents (4 for Stable Diffusion's autoencoder) or images.
        num_classes: classes K, from 1 up; label K stands for no class (:attr:`null_label`).
        learn_sigma: predict as many channels again, which say where the variance lies.
        embed_dim: channels C of the tokens, a multiple of 4. depth: number of blocks. num_heads: of the mixer.
        mlp_ratio: hidden width of the feed-forward network, in units of C.
        mixer: name of a registered mixer, or a class of the same signature. mixer_kwargs: its keyword arguments.
        cpe: the 3x3 depthwise convolution before each block, which DiT lacks.
        img_size: nominal (height, width) of the latents, in latent pixels; only recorded.

    Raises:
        ValueError: a size that does not fit, or an unknown mixer.
    """

    def __init__(
        self,
        patch_size: int = 2,
        in_chans: int = 4,
        num_classes: int = 1000,
        learn_sigma: bool = True,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        mixer: str | type[nn.Module] = "ttt",
        mixer_kwargs: dict | None = None,
        cpe: bool = True,
        img_size: int | tuple[int, int] = 32,
    ):
        super().__init__()
        for name, value in dict(patch_size=patch_size, depth=depth, in_chans=in_chans, num_classes=num_classes).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.patch_size, self.in_chans, self.num_classes = patch_size, in_chans, num_classes
        self.learn_sigma, self.out_chans = learn_sigma, in_chans * (2 if learn_sigma else 1)
        self.embed_dim = self.num_features = embed_dim
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.x_embedder = PatchEmbed(in_chans, embed_dim, patch_size)
        self.position = SinCos2d(embed_dim)
        self.t_embedder = TimeEmbed(embed_dim)
        self.y_embedder = LabelEmbed(num_classes, embed_dim)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, mixer, mixer_kwargs or {}, cpe) for _ in range(depth)
        )
        self.final_layer = FinalLayer(embed_dim, patch_size, self.out_chans)
        self.reset_parameters()

    @property
    def null_label(self) -> int:
        """The label that stands for no class: ``num_classes``."""
        return self.num_classes

    def reset_parameters(self) -> None:
        """DiT's start: Xavier-uniform layers, and zeros where blocks and output are gated: all begin as identity.

        The mixers' learned starts W0 and the depthwise convolutions keep their own.
        """
        self.apply(_init_linear)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))  # a view: as if it were linear
        nn.init.zeros_(self.x_embedder.proj.bias)
        for layer in (self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(layer.weight, std=0.02)
        gates = [block.adaLN_modulation[-1] for block in self.blocks]
        for layer in (*gates, self.final_layer.adaLN_modulation[-1], self.final_layer.linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names never decayed besides 1-D tensors: none. DiT's recipe has no weight decay at all."""
        return set()

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        """Parameter names by depth, for layer-wise learning rates."""
        return dict(stem=r"^[xty]_embedder", blocks=[(r"^blocks\.(\d+)", None), (r"^final_layer", (99999,))])

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict noise (or velocity) and, with ``learn_sigma``, where the variance lies.

        Args:
            x: noisy images or latents (B, in_chans, H, W), of any size; sides that are no multiples of the patch are
                padded with zeros at right and bottom, and the output is cut back.
            t: times (B,), 0 to 1000; need not be whole. y: labels (B,), 0 to num_classes.

        Returns:
            (B, out_chans, H, W).

        Raises:
            ValueError: shapes do not fit.
        """
        self._check(x, t, y)
        c = self.t_embedder(t) + self.y_embedder(y)  # (B, C)
        tokens, h, w = self.x_embedder(x)  # (B, h*w, C)
        tokens = self.position(tokens, h, w)
        for block in self.blocks:
            tokens = self._run(block, tokens, c, h, w)
        patches = self.final_layer(tokens, c)  # (B, h*w, P*P*out_chans)
        return crop(self._unpatchify(patches, h, w), *x.shape[-2:])

    def example_inputs(self, img_size: tuple[int, int], batch: int = 1, device=None) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of :meth:`forward` for (height, width), in latent pixels; their values mean nothing."""
        integers = dict(dtype=torch.long, device=device)
        x = torch.zeros(batch, self.in_chans, *img_size, device=device)
        return x, torch.zeros(batch, **integers), torch.zeros(batch, **integers)

    def _unpatchify(self, patches: Tensor, h: int, w: int) -> Tensor:
        """(B, h*w, P*P*out_chans) to (B, out_chans, h*P, w*P)."""
        p = self.patch_size
        patches = patches.unflatten(1, (h, w)).unflatten(-1, (p, p, self.out_chans))  # (B, h, w, p, p, c)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _check(self, x: Tensor, t: Tensor, y: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(
                f"x must be (B, {self.in_chans}, H, W): this model was built with in_chans={self.in_chans}; "
                f"got {tuple(x.shape)}"
            )
        for name, value in (("t", t), ("y", y)):
            if value.shape != x.shape[:1]:
                raise ValueError(f"{name} must be ({x.shape[0]},), one for each of x; got {tuple(value.shape)}")


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# Width, depth and heads (paper, table 13; L and XL: the authors' code, which has no results for them)
ARCHS = {
    "s": dict(embed_dim=384, depth=12, num_heads=6),
    "b": dict(embed_dim=768, depth=12, num_heads=12),
    "l": dict(embed_dim=1024, depth=24, num_heads=16),
    "xl": dict(embed_dim=1152, depth=28, num_heads=16),
}
PATCHES = (2, 4, 8)
GENERATOR_NAMES = tuple(f"dit3_{arch}_{patch}" for arch in ARCHS for patch in PATCHES)


def _entrypoint(arch: str, patch: int):
    """What timm calls for one of ``GENERATOR_NAMES``."""

    def create(pretrained: bool = False, **kwargs) -> DiT3:
        options = {"patch_size": patch, **ARCHS[arch], **kwargs}
        return build_generator(DiT3, create.__name__, pretrained, **options)

    create.__name__ = create.__qualname__ = f"dit3_{arch}_{patch}"
    create.__doc__ = f"DiT³-{arch.upper()}/{patch} for latents of four channels and 1,000 classes."
    return create


for _name in GENERATOR_NAMES:
    _, _arch, _patch = _name.split("_")
    setattr(sys.modules[__name__], _name, register_model(_entrypoint(_arch, int(_patch))))
