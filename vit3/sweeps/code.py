"""Which version of the code computed a number: a hash over the files that decide it, and over nothing else."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

# What the command line, plots, documentation or the sweep itself say does not change a result.
_DECIDES = (
    *("ops", "inner", "mixers", "layers", "models", "data", "diffusion", "tasks", "engine", "build", "config"),
    *("generation/evaluate.py", "seeding.py"),
)


@functools.cache
def code_version(package: Path = Path(__file__).parent.parent) -> str:
    """Twelve hexadecimal digits; comments, docstrings and layout do not change them.

    Args:
        package: folder of the package.
    """
    digest = hashlib.sha256()
    for name in _DECIDES:
        path = package / name
        for file in [path] if path.suffix else sorted(path.rglob("*.py")):
            digest.update(
                f"{file.relative_to(package).as_posix()}\n{_essence(file.read_text(encoding='utf-8'))}\n".encode()
            )
    return digest.hexdigest()[:12]


def _essence(source: str) -> str:
    """Source code less its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
