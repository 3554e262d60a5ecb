"""Where a run is, what it has reached so far, and how that is said in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunPlace:
    """Where a run is; with the tensors, all there is to know to go on.

    Attributes:
        epoch: the one at work, from 0. position: images of it that are used up.
        lr: learning rate of its first update, the largest of all parameters.
        loss_sums, images: losses of its updates so far times their images, and these images.
        best: of ``raw`` and ``ema`` weights each the epoch and top-1. record: numbers of the last finished epoch.
        seconds: of training and evaluation. bad_images: skipped so far.
    """

    epoch: int = 0
    position: int = 0
    lr: float = 0.0
    loss_sums: dict[str, float] = field(default_factory=dict)
    images: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    seconds: float = 0.0
    bad_images: int = 0

    def note_best(self, record: dict[str, Any]) -> list[str]:
        """Remember the best top-1 of raw and of averaged weights, ties to the earlier epoch; returns what improved."""
        improved = []
        for weights, key in (("raw", "val/top1"), ("ema", "val_ema/top1")):
            best = self.best.get(weights)
            if key in record and (best is None or record[key] > best["top1"]):
                self.best[weights] = {"epoch": record["epoch"], "top1": record[key]}
                improved.append(weights)
        return improved

    def better(self) -> dict[str, Any] | None:
        """The better of the best raw and the best averaged weights; ties go to the earlier epoch, then to raw."""
        found = [{"epoch": b["epoch"], "weights": weights, "top1": b["top1"]} for weights, b in self.best.items()]
        return max(found, key=lambda b: (b["top1"], -b["epoch"], b["weights"] == "raw"), default=None)


def epoch_line(record: dict[str, Any], epochs: int, best: dict[str, Any]) -> str:
    """One line of the log for one epoch."""
    loss = f"{record['train/loss']:.4f}" if "train/loss" in record else "none"
    ema = f"  ema {record['val_ema/top1']:6.2f} %" if "val_ema/top1" in record else ""
    left = record["seconds"] / (record["epoch"] + 1) * (epochs - record["epoch"] - 1)
    return (
        f"epoch {record['epoch'] + 1:3d}/{epochs}  loss {loss}"
        f"  top-1 {record['val/top1']:6.2f} %{ema}"
        f"  best {best['top1']:.2f} %  {record['images_per_s']:,.0f} images/s  {_duration(left)} left"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
