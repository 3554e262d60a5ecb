"""Where a run is, what it has reached so far, and how that is said in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Score:
    """The number of an evaluation by which epochs are compared.

    Attributes:
        name: as the evaluation calls it. title: as people do. form: how it is printed.
        smaller: whether smaller is better.
    """

    name: str = "top1"
    title: str = "top-1"
    form: str = "{:6.2f} %"
    smaller: bool = False

    def text(self, value: float) -> str:
        """``value`` as printed, in a column of its own."""
        return self.form.format(value)

    def merit(self, value: float) -> float:
        """``value`` with such a sign that larger is better."""
        return -value if self.smaller else value


@dataclass
class RunPlace:
    """Where a run is; with the tensors, all there is to know to go on.

    Attributes:
        epoch: the one at work, from 0. position: images of it that are used up.
        lr: learning rate of its first update, the largest of all parameters.
        loss_sums, images: losses of its updates so far times their images, and these images.
        best: of ``raw`` and ``ema`` weights each the epoch and score. record: numbers of the last finished epoch.
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

    def note_best(self, record: dict[str, Any], score: Score) -> list[str]:
        """Remember the best score of raw and of averaged weights, ties to the earlier epoch; returns what improved."""
        improved = []
        for weights, key in (("raw", f"val/{score.name}"), ("ema", f"val_ema/{score.name}")):
            best = self.best.get(weights)
            if key in record and (best is None or score.merit(record[key]) > score.merit(best[score.name])):
                self.best[weights] = {"epoch": record["epoch"], score.name: record[key]}
                improved.append(weights)
        return improved

    def better(self, score: Score) -> dict[str, Any] | None:
        """The better of the best raw and the best averaged weights; ties go to the earlier epoch, then to raw."""
        name = score.name
        found = [{"epoch": b["epoch"], "weights": weights, name: b[name]} for weights, b in self.best.items()]
        return max(found, key=lambda b: (score.merit(b[name]), -b["epoch"], b["weights"] == "raw"), default=None)


def epoch_line(record: dict[str, Any], epochs: int, best: dict[str, Any], score: Score) -> str:
    """One line of the log for one epoch."""
    loss = f"{record['train/loss']:.4f}" if "train/loss" in record else "none"
    ema = f"  ema {score.text(record[key])}" if (key := f"val_ema/{score.name}") in record else ""
    left = record["seconds"] / (record["epoch"] + 1) * (epochs - record["epoch"] - 1)
    return (
        f"epoch {record['epoch'] + 1:3d}/{epochs}  loss {loss}"
        f"  {score.title} {score.text(record[f'val/{score.name}'])}{ema}"
        f"  best {score.text(best[score.name]).strip()}  {record['images_per_s']:,.0f} images/s  {_duration(left)} left"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
