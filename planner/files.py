"""Files are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` through a temporary file beside it, so that a failure leaves the old file as it was.

    A device or a pipe (``/dev/stdout``) has no old contents to keep and is written directly.

    Raises:
        OSError: with the system's number and the file's name; nothing was replaced.
    """
    target = Path(os.path.realpath(path))  # A link keeps pointing where it did.
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        _replace(target, data)
    except OSError as error:
        raise type(error)(error.errno, f"not written: {error.strerror}", str(path)) from error


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
