"""Functional operators: tensors in, tensors out. They know no module and no config.

Letters used in names and comments: B batch, M heads, N tokens, D head dim, H x W grid.
"""

from vit3.ops.backend import choose_backend
from vit3.ops.dwconv_ttt import IMPLEMENTATIONS as _DWCONV
from vit3.ops.dwconv_ttt import dwconv_ttt
from vit3.ops.glu_ttt import IMPLEMENTATIONS as _GLU
from vit3.ops.glu_ttt import glu_ttt


def check_backend(backend: str) -> None:
    """Raise a ValueError unless both operators offer ``backend``, long before the first call."""
    choose_backend("glu_ttt", backend, _GLU)
    choose_backend("dwconv_ttt", backend, _DWCONV)


__all__ = ["check_backend", "dwconv_ttt", "glu_ttt"]
