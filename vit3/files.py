"""Files that are at any moment either the old one or the whole new one, and what identifies a file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Context that yields a temporary binary file beside ``path``; on success it is synced and takes its place.

    The temporary name is unique, so several processes may write the same path; the last one wins.

    Raises:
        OSError: as the file system says; ``path`` is untouched and the temporary file gone.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
        _sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    Raises:
        OSError: as the file system says.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a renaming last through a power failure, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
