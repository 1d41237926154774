"""The errors the planner raises: one class per cause, facts as attributes, the remedy in the message."""

from __future__ import annotations


class PlannerError(Exception):
    """Base of every error the planner raises on purpose."""


class TraceError(PlannerError):
    """The module or function could not be traced into a graph.

    Attributes:
        operation: name of the operation (or of the argument) at fault.
        source: where in the user's code it stands, ``"file.py:12"``, or ``""`` if unknown.
        remedy: what the user can do.
    """

    def __init__(self, operation: str, cause: str, remedy: str, source: str = "") -> None:
        self.operation = operation
        self.source = source
        self.remedy = remedy
        where = f" at {source}" if source else ""
        super().__init__(f"cannot trace {operation}{where}: {cause}; {remedy}")


class GraphError(PlannerError):
    """A graph breaks one of its own rules (an index out of range, a tensor outside its storage)."""

    def __init__(self, subject: str, cause: str) -> None:
        self.subject = subject
        super().__init__(f"graph is not well-formed: {subject}: {cause}")


class ShapeError(PlannerError):
    """A size, count or dtype given by the user cannot be used."""

    def __init__(self, name: str, value: object, cause: str) -> None:
        self.name = name
        self.value = value
        super().__init__(f"{name}={value!r}: {cause}")


class StrategyError(PlannerError):
    """The requested strategy does not exist or does not apply to this graph."""

    def __init__(self, strategy: str, cause: str) -> None:
        self.strategy = strategy
        super().__init__(f"strategy {strategy!r}: {cause}")


class ProblemError(PlannerError):
    """An allocation problem (or its file) is malformed.

    Attributes:
        source: the file or object read.
        line: 1-based line in the file, or ``None``.
    """

    def __init__(self, source: str, cause: str, line: int | None = None) -> None:
        self.source = source
        self.line = line
        where = source if line is None else f"{source}, line {line}"
        super().__init__(f"{where}: {cause}")


class CapacityError(PlannerError):
    """A packing does not fit in the capacity (or the plan in its budget).

    Attributes:
        capacity_nbytes: what was allowed.
        needed_nbytes: the least arena known to be reachable (or the lower bound, if that already exceeds it).
        step: the step at which most bytes are alive.
        bottleneck: names of the largest storages alive at that step, largest first.
        proved: whether no packing at all can fit.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        needed_nbytes: int,
        step: int,
        bottleneck: tuple[str, ...],
        proved: bool,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.needed_nbytes = needed_nbytes
        self.step = step
        self.bottleneck = bottleneck
        self.proved = proved
        certainty = "no packing fits" if proved else "no packing was found that fits"
        names = ", ".join(bottleneck) or "nothing"
        super().__init__(
            f"{certainty} in {capacity_nbytes} bytes: {needed_nbytes - capacity_nbytes} bytes too few"
            f" (least known {needed_nbytes}); most is alive at step {step}: {names}"
        )


class BudgetError(CapacityError):
    """No plan of a graph is within its budget.

    Attributes:
        capacity_nbytes: the budget.
        needed_nbytes, least_nbytes: the least arena that planning reaches; a plan with this budget succeeds.
        step: the step of that plan at which most bytes are alive.
        operation: the operation of that step, ``"aten.mm.default (mm_3)"``.
        source: where it stands in the user's code, ``"file.py:12"``, or ``""``.
        bottleneck: names of the largest storages alive there, largest first.
        bottleneck_nbytes: their sizes.
    """

    def __init__(
        self,
        budget_nbytes: int,
        least_nbytes: int,
        step: int,
        operation: str,
        source: str,
        largest: tuple[tuple[str, int], ...],
    ) -> None:
        super().__init__(budget_nbytes, least_nbytes, step, tuple(name for name, _ in largest), proved=False)
        self.least_nbytes = least_nbytes
        self.operation = operation
        self.source = source
        self.bottleneck_nbytes = tuple(nbytes for _, nbytes in largest)
        where = f"step {step}" + (f", {operation}" if operation else "") + (f" at {source}" if source else "")
        names = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in largest) or "nothing"
        message = (
            f"no plan fits in the budget of {budget_nbytes} bytes: the least reachable is {least_nbytes} bytes; most "
            f"is alive at {where}: {names}; allow {least_nbytes} bytes, or make the batch smaller"
        )
        self.args = (message,)


class PlanFileError(PlannerError):
    """A plan file is missing, truncated, malformed, or of an unknown schema.

    Attributes:
        source: the file read.
        cause: what is wrong, naming the field.
    """

    def __init__(self, source: str, cause: str) -> None:
        self.source = source
        self.cause = cause
        super().__init__(f"{source}: not a usable plan: {cause}")


class SnapshotFileError(PlannerError):
    """A file is no memory snapshot that can be read: another kind of file, cut off, unsafe, or with unusable values.

    Attributes:
        source: the file read.
        cause: what is wrong, naming the field or the byte.
    """

    def __init__(self, source: str, cause: str) -> None:
        self.source = source
        self.cause = cause
        super().__init__(f"{source}: not a usable memory snapshot: {cause}")


class VerificationError(PlannerError):
    """A plan breaks a rule that every plan must keep; it is never run.

    Attributes:
        rule: the rule broken, one word or two ("overlap", "alignment", …).
        storages: names of the storages (or operations) involved.
        cause: what is wrong, in words.
        source: the file the plan was read from, or ``""``.
    """

    def __init__(self, rule: str, storages: tuple[str, ...], cause: str, source: str = "") -> None:
        self.rule = rule
        self.storages = storages
        self.cause = cause
        self.source = source
        where = f"{source}: the plan" if source else "plan"
        remedy = "; the file was changed after it was saved: save the plan again from its graph" if source else ""
        super().__init__(f"{where} fails verification ({rule}): {cause}{remedy}")
