"""The one place where ``backend=`` becomes a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

BACKENDS = ("auto", "reference", "fused", "triton")


def choose_backend(op: str, backend: str, implementations: Mapping[str, Callable]) -> Callable:
    """Return the implementation of ``op`` that ``backend`` asks for.

    Args:
        op: name of the operator, for the error message.
        backend: one of :data:`BACKENDS`; ``"auto"`` takes the first of ``implementations``.
        implementations: what the operator offers, best first.

    Raises:
        ValueError: unknown backend, or one that this operator does not offer.
    """
    if backend == "auto":
        return next(iter(implementations.values()))
    if backend in implementations:
        return implementations[backend]
    offered = ", ".join(["auto", *implementations])
    if backend in BACKENDS:
        raise ValueError(f"backend='{backend}' is not available for {op} in this version; use one of: {offered}")
    raise ValueError(f"backend='{backend}' is unknown; {op} offers: {offered}")
