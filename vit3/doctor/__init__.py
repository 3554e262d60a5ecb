"""What can be known to fail, be slow or be forgotten before a run: of the machine, and of a configuration on it."""

from vit3.doctor.before import before_first_step
from vit3.doctor.check import FAIL, OK, WARNING, Check, attempt, heed

__all__ = ["FAIL", "OK", "WARNING", "Check", "attempt", "before_first_step", "heed"]
