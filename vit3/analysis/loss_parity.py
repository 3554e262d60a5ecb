"""Whether a backend trains as the closed form does: the losses of the same steps, side by side."""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
import torch.nn.functional as F

STEPS = 30
BOUND = 1e-5  # relative, between the losses of any step, in float32


def losses(backend: str, device: torch.device, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[float]:
    """Losses of a small classifier on fixed random images, AdamW, same start for every backend.

    Args:
        dtype: float32, or the dtype of autocast.
        steps: updates; with the loss before each.
    """
    torch.manual_seed(0)
    model = timm.create_model(
        "vit3_tiny", embed_dim=96, depth=3, num_heads=3, num_classes=10, mixer_kwargs=dict(backend=backend)
    ).to(device)
    images, labels = torch.randn(8, 3, 64, 96).to(device), torch.randint(10, (8,)).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    result = []
    for _ in range(steps):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images).float(), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        result.append(loss.item())
    return result


def deviation(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference between the losses of a step."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs))


def main() -> None:
    """``python -m vit3.analysis.loss_parity DEVICE FILE``: compare what runs there, write a table; status 1 if red."""
    device, target = torch.device(sys.argv[1]), Path(sys.argv[2])
    reference = losses("reference", device)
    lines, red = ["| backend | dtype | largest relative difference of a loss | bound |", "|---|---|---|---|"], False
    for backend in ("fused", "triton") if device.type == "cuda" else ("fused",):
        found = deviation(losses(backend, device), reference)
        red |= not found <= BOUND
        lines.append(f"| {backend} | float32 | {found:.1e} | {BOUND:.0e} |")
        half = deviation(losses(backend, device, torch.bfloat16), losses("reference", device, torch.bfloat16))
        lines.append(f"| {backend} | bfloat16 autocast | {half:.1e} | for information |")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    sys.exit(red)


if __name__ == "__main__":
    main()
