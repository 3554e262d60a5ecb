"""Functional operators: tensors in, tensors out. They know no module and no config.

Letters used in names and comments: B batch, M heads, N tokens, D head dim, C = M*D channels, H x W grid.
"""

from vit3.ops.backend import check_backend
from vit3.ops.dwconv_ttt import dwconv_ttt
from vit3.ops.glu_ttt import glu_ttt
from vit3.ops.packed_ttt import packed_ttt

__all__ = ["check_backend", "dwconv_ttt", "glu_ttt", "packed_ttt"]
