"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def require_writable(path: Path) -> None:
    """Refuse a file that `write_whole` could not write, before any work is done for it.

    Raises:
        OSError: it is a directory, its directory is not there, or the system does not allow writing there.
    """
    target = Path(os.path.realpath(path))
    place = target if target.exists() and not target.is_file() else target.parent
    if target.is_dir():
        number, reason = errno.EISDIR, "it is a directory; name a file in it"
    elif not target.parent.exists():
        number, reason = errno.ENOENT, f"there is no directory {target.parent}; make it first"
    elif not target.parent.is_dir():
        number, reason = errno.ENOTDIR, f"{target.parent} is no directory"
    elif not os.access(place, os.W_OK):
        number, reason = errno.EACCES, f"writing to {place} is not allowed; choose another place"
    else:
        return
    raise OSError(number, f"not written: {reason}", str(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` through a temporary file beside it, so that a failure leaves the old file as it was.

    A device or a pipe (``/dev/stdout``) has no old contents to keep and is written directly.

    Raises:
        OSError: with the system's number and the file's name; nothing was replaced.
    """
    target = Path(os.path.realpath(path))  # A link keeps pointing where it did.
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
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
