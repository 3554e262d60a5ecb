"""One finding, and how an error or a warning becomes one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vit3.errors import UserError

logger = logging.getLogger(__name__)

OK, WARNING, FAIL = "ok", "warning", "FAIL"


@dataclass(frozen=True)
class Check:
    """What was looked at and found.

    Attributes:
        name: of the check, one or two words. status: ``OK``, ``WARNING`` or ``FAIL``. detail: what was found.
        cure: what to do about it.
    """

    name: str
    status: str
    detail: str
    cure: str = ""

    @property
    def sentence(self) -> str:
        """Detail and cure in one."""
        return f"{self.detail}; {self.cure}" if self.cure else self.detail

    @classmethod
    def of(cls, name: str, status: str, sentence: str) -> Check:
        """From a sentence whose last part, after ``;``, is the cure."""
        detail, _, cure = sentence.rpartition("; ")
        return cls(name, status, detail or cure, cure if detail else "")


def heed(checks: list[Check]) -> None:
    """Log each warning.

    Raises:
        UserError: the first failed check.
    """
    for check in checks:
        if check.status == WARNING:
            logger.warning(check.sentence)
    for check in checks:
        if check.status == FAIL:
            raise UserError(check.sentence)


class _Collector(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.said: list[str] = []
        self.warned: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        (self.warned if record.levelno >= logging.WARNING else self.said).append(record.getMessage())


def attempt(name: str, action: Callable[[], Any], describe: Callable[[Any], str]) -> tuple[Check, Any]:
    """Do what training does, and report what it says.

    Args:
        name: of the check. action: raises a UserError where it fails. describe: what to say of its result.

    Returns:
        The check (a warning where the action logged one) and the result of the action, None where it failed.
    """
    collector, package = _Collector(), logging.getLogger("vit3")
    before = package.level, package.propagate
    package.addHandler(collector)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        result = action()
    except UserError as error:
        return Check.of(name, FAIL, str(error)), None
    finally:
        package.removeHandler(collector)
        package.setLevel(before[0])
        package.propagate = before[1]
    if collector.warned:
        return Check.of(name, WARNING, "; ".join(collector.warned)), result
    return Check(name, OK, ". ".join([describe(result), *collector.said])), result
