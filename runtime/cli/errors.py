"""How every command ends when something is wrong: one line on standard error and an exit status, no traceback."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from planner.errors import CapacityError, PlannerError, VerificationError
from runtime.cli.interrupts import ended_in_order
from runtime.errors import ArenaError, ArenaMemoryError

#: The work was done and failed: a check, a budget, a full disk.
FAILED = 1
#: The call was wrong: an argument, an input file.
WRONG_CALL = 2
#: Stopped by the user; what a shell reports for SIGINT.
INTERRUPTED = 130

#: Errors that say the work failed. Every other error on purpose says the call was wrong.
_FAILURES = (VerificationError, CapacityError, MemoryError, ArenaMemoryError)
#: System errors that no other argument would have avoided.
_FAILED_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM})

#: What the command framework raises for itself: exits and wrong usage.
_FRAMEWORK: tuple[type[BaseException], ...] = (typer.Exit, typer.Abort, *typer.BadParameter.__mro__[1:3])

#: Remedies for errors that nobody raised on purpose.
OUT_OF_MEMORY = "take a smaller shape, or plan without --run, which needs no memory for data"
UNEXPECTED = "--debug shows where; unless that is your own code, please report it"


class CallError(Exception):
    """The command was called wrongly: an option out of range, a name that does not exist."""


@contextmanager
def one_line_errors(debug: bool = False) -> Iterator[None]:
    """Turn expected errors into ``arenaplan: error: ...`` and an exit status; with ``debug`` let them through.

    Wrap the whole body of a command::

        def inspect(path: Path, debug: bool = False) -> None:
            with one_line_errors(debug):
                ...

    Raises:
        typer.Exit: with status 1, 2 or 130.
    """
    try:
        with ended_in_order():
            yield
    except BrokenPipeError:
        raise  # The reader went away (`| head`); the command framework ends quietly.
    except (PlannerError, ArenaError, CallError, OSError, MemoryError) as error:
        if debug:
            raise
        say(f"error: {describe(error)}")
        raise typer.Exit(exit_status(error)) from None
    except KeyboardInterrupt:
        if debug:
            raise
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug or isinstance(error, _FRAMEWORK):
            raise
        say(f"error: {describe(error)}; {OUT_OF_MEMORY if out_of_memory(error) else UNEXPECTED}")
        raise typer.Exit(FAILED) from None


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch failed to allocate: on a CPU that is a plain RuntimeError, on a device a class of its own."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "alloc_cpu.cpp" in str(error)


def exit_status(error: BaseException) -> int:
    """1 if the work failed, 2 if the call was wrong."""
    if isinstance(error, _FAILURES):
        return FAILED
    if isinstance(error, OSError) and error.errno in _FAILED_ERRNO:
        return FAILED
    return WRONG_CALL


def describe(error: BaseException) -> str:
    """The error as one line, the file first where the system names one."""
    if isinstance(error, OSError) and error.strerror:
        unnamed = "standard output, or a temporary file" if error.errno in _FAILED_ERRNO else ""
        where = error.filename if error.filename is not None else unnamed
        text = f"{where}: {error.strerror}" if where else error.strerror
    elif isinstance(error, MemoryError):
        text = f"not enough memory{f': {error}' if str(error) else ''}"
    elif out_of_memory(error):
        text = f"not enough memory: {str(error).rpartition('DefaultCPUAllocator: ')[2]}"
    elif type(error).__module__ == "builtins":
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    else:
        text = str(error) or type(error).__name__
    return " ".join(text.split())


def say(message: str) -> None:
    """One line on standard error, where everything goes that is not the command's result."""
    print(f"arenaplan: {message}", file=sys.stderr, flush=True)
