"""Where the time of an update goes: shares in per cent, and a trace to look at."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("data", "forward and backward", "optimizer", "ema")  # the rest is the loop's own
_WARMUP, _TRACED = 3, 2  # updates that are not looked at; updates in the trace


class Profile:
    """Times the phases of so many updates, after three, and then traces two: ``profile.json`` and ``trace.json``.

    The trace opens in Perfetto or chrome://tracing. Timing waits for the GPU at each border, so that times are right
    and these updates are slower.

    Args:
        updates: how many to time; 0 turns it off. device: where the model computes. folder: for the files; None
            (in all but the main process) writes none.
    """

    def __init__(self, updates: int, device: torch.device, folder: Path | None):
        self.updates, self.device, self.folder = updates, device, folder
        self._seen = 0
        self._on = False
        self._seconds: dict[str, float] = defaultdict(float)
        self._total, self._border, self._profiler = 0.0, 0.0, None

    def phase(self, name: str):
        """Context of one phase."""
        return self._timed(name) if self._on else nullcontext()

    def epoch_starts(self) -> None:
        """Call before the first update of every epoch: what lies between epochs is not looked at."""
        if self.updates:
            self._border = self._now()

    def update_done(self) -> None:
        """Call after every update."""
        if not self.updates:
            return
        self._seen += 1
        now = self._now()
        if self._on:
            self._total += now - self._border
        self._border = now
        if self._seen == _WARMUP:
            self._on = True
        elif self._seen == _WARMUP + self.updates:
            self._write_shares(self._total)
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profiler = profile(activities=activities)
            self._profiler.start()
        elif self._seen == _WARMUP + self.updates + _TRACED:
            self.close()

    def close(self) -> None:
        """End the trace and write it, however many updates it has; call at the end of a run too."""
        self._on, self.updates = False, 0
        if self._profiler is None:
            return
        self._profiler.stop()
        if self.folder is not None:
            self._profiler.export_chrome_trace(str(self.folder / "trace.json"))
        self._profiler = None

    @contextmanager
    def _timed(self, name: str):
        started = self._now()
        with record_function(name):
            yield
        self._seconds[name] += self._now() - started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _write_shares(self, total: float) -> None:
        if self.folder is None:
            return
        shares = {name: round(100 * self._seconds[name] / total, 2) for name in PHASES}
        shares["loop"] = round(100 - sum(shares.values()), 2)
        report = {"updates": self.updates, "seconds_per_update": total / self.updates, "per_cent": shares}
        (self.folder / "profile.json").write_text(json.dumps(report, indent=2) + "\n")
