"""Being told to stop: save first, then leave with a code that a launcher starts again on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vit3.errors import Interrupted

logger = logging.getLogger(__name__)

REQUEUE_CODE = 75  # EX_TEMPFAIL: nothing is wrong, start the same command again
_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")


class StopRequest:
    """Whether a signal asked this process to stop; a second SIGINT stops at once.

    SIGTERM and SIGUSR1 are what SLURM sends before it takes a node away, SIGINT is Ctrl-C. SIGUSR2 is heeded only where
    a launcher (submitit) has put a handler of its own, which gets its signal once everything is saved.
    """

    def __init__(self):
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def interrupted(self, what: str) -> Interrupted:
        """The exception to leave with, after saving. Args: what: where everything is."""
        name = signal.Signals(self.signal).name if self.signal else "a signal to another process"
        code = 128 + signal.SIGINT if self.signal == signal.SIGINT else REQUEUE_CODE
        return Interrupted(f"stopped by {name}; {what}", code)

    def hand_on(self) -> None:
        """Give the signal to the handler that a launcher had put before ours, if it had."""
        handler = self._before.get(self.signal)
        if callable(handler) and handler is not signal.default_int_handler:
            self.restore()
            os.kill(os.getpid(), self.signal)

    def install(self) -> None:
        """Note signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python gives signals to the main thread alone
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is None:
                continue
            before = signal.getsignal(number)
            if name == "SIGUSR2" and not callable(before):
                continue
            self._before[number] = before
            signal.signal(number, self._note)

    def restore(self) -> None:
        """Give all signals back to who had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Context in which signals to stop are noted rather than obeyed at once."""
    request = StopRequest()
    request.install()
    try:
        yield request
    finally:
        request.restore()
