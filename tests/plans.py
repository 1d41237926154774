"""Plans built by hand, for tests that need a plan but no tracer."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from functools import cache

from planner.graph import (
    FILLED_ROLES,
    Argument,
    Dtype,
    Graph,
    Operation,
    Port,
    Role,
    Storage,
    Tensor,
    TensorRef,
    dense_strides,
)
from planner.plan import Formula, Placement, Plan, padded

#: Roles of what somebody reads after the last step.
LASTING_ROLES = frozenset(
    {Role.OUTPUT, Role.GRADIENT, Role.PARAMETER_GRADIENT, Role.PARAMETER, Role.BUFFER, Role.CONSTANT}
)

_PORTS = {
    Role.INPUT: "inputs",
    Role.SAVED: "inputs",
    Role.GRAD_OUTPUT: "inputs",
    Role.PARAMETER: "states",
    Role.BUFFER: "states",
    Role.CONSTANT: "constants",
    Role.OUTPUT: "outputs",
    Role.GRADIENT: "gradients",
    Role.PARAMETER_GRADIENT: "gradients",
}


@dataclass
class PlanBuilder:
    """Collects storages and operations; `build` derives lifetimes and packs them first-fit."""

    mode: str = "backward"
    alignment: int = 256
    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    in_place: dict[int, int] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)

    def storage(self, name: str, shape: tuple[int, ...], role: Role = Role.TEMPORARY, dtype: str = "float32") -> int:
        """A new storage and the contiguous tensor that fills it; returns the tensor."""
        tensor = Tensor(name, len(self.storages), 0, shape, dense_strides(shape), dtype)
        self.storages.append(Storage(name, tensor.end, role))
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def view(self, name: str, of: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> int:
        """Another tensor over the storage of ``of``."""
        base = self.tensors[of]
        self.tensors.append(Tensor(name, base.storage, offset, shape, strides, base.dtype))
        return len(self.tensors) - 1

    def step(
        self,
        name: str,
        operator: str,
        arguments: tuple[Argument, ...],
        output: int,
        *,
        keywords: tuple[tuple[str, Argument], ...] = (),
        over: int | None = None,
        workspaces: tuple[int, ...] = (),
        source: str = "",
    ) -> None:
        """Append an operation that writes tensor ``output``, taking the place of tensor ``over`` if given."""
        self.operations.append(Operation(name, operator, arguments, keywords, (output,), workspaces, source))
        if over is not None:
            self.in_place[self.tensors[output].storage] = self.tensors[over].storage

    def build(self, **changes: object) -> Plan:
        """The plan: lifetimes from first write to last use, offsets first-fit in order of birth."""
        steps = max(len(self.operations), 1)
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for step, operation in enumerate(self.operations):
            for tensor in operation.reads + operation.writes:
                storage = self.tensors[tensor].storage
                births.setdefault(storage, step)
                deaths[storage] = step + 1
        for index, storage in enumerate(self.storages):
            if storage.role in FILLED_ROLES or storage.role is Role.PARAMETER_GRADIENT:
                births[index] = 0
            if storage.role in LASTING_ROLES:
                deaths[index] = steps
            births.setdefault(index, 0)
            deaths.setdefault(index, births[index] + 1)
        offsets = self._first_fit(births, deaths)
        sizes = [padded(storage.nbytes, self.alignment) for storage in self.storages]
        live = [0] * (steps + 1)
        for index, size in enumerate(sizes):
            live[births[index]] += size
            live[deaths[index]] -= size
        for later, earlier in self.in_place.items():  # At the step where bytes change hands they count once.
            live[births[later]] -= min(sizes[later], sizes[earlier])
            live[births[later] + 1] += min(sizes[later], sizes[earlier])
        total = bound = 0
        for change in live:
            total += change
            bound = max(bound, total)
        arena = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
        placements = tuple(
            Placement(offsets[index], births[index], deaths[index], self.in_place.get(index))
            for index in range(len(self.storages))
        )
        facts: dict[str, object] = {
            "graph": self._graph(),
            "placements": placements,
            "alignment": self.alignment,
            "arena_nbytes": arena,
            "lower_bound_nbytes": bound,
            "naive_nbytes": sum(sizes),
            "strategy": "materialized",
            "slices": None,
            "algorithm": "first_fit.birth",
            "proved_optimal": arena == bound,
        }
        return Plan(**{**facts, **changes})  # type: ignore[arg-type]

    def _first_fit(self, births: dict[int, int], deaths: dict[int, int]) -> list[int]:
        """Storages that live throughout lie at the bottom; the others take the lowest gap free at their birth."""
        steps = max(len(self.operations), 1)
        offsets = [0] * len(self.storages)
        bottom = 0
        alive: list[tuple[int, int, int]] = []  # (offset, end, storage), by offset
        for index in sorted(range(len(self.storages)), key=lambda i: (deaths[i] - births[i] < steps, births[i], i)):
            size = padded(self.storages[index].nbytes, self.alignment)
            if deaths[index] - births[index] == steps:
                offsets[index], bottom = bottom, bottom + size
                continue
            alive = [entry for entry in alive if deaths[entry[2]] > births[index]]
            taken_over = self.in_place.get(index)
            offset = bottom
            if taken_over is not None:
                offset = offsets[taken_over]
            else:
                for start, end, _ in alive:
                    if offset + size <= start:
                        break
                    offset = max(offset, end)
            offsets[index] = offset
            if size:
                insort(alive, (offset, offset + size, index))
        return offsets

    def _graph(self) -> Graph:
        ports: dict[str, list[Port]] = {name: [] for name in _PORTS.values()}
        first = {tensor.storage: index for index, tensor in reversed(list(enumerate(self.tensors)))}
        for index, storage in enumerate(self.storages):
            if storage.role in _PORTS:
                ports[_PORTS[storage.role]].append(Port(storage.name, first[index]))
        return Graph(
            mode=self.mode,
            storages=tuple(self.storages),
            tensors=tuple(self.tensors),
            operations=tuple(self.operations),
            values=dict(self.values),
            **{name: tuple(found) for name, found in ports.items()},  # type: ignore[arg-type]
        )


def small_plan() -> Plan:
    """The backward of ``dropout(x @ w)``: every role of a backward, a view, an in-place chain, a constant, a dtype."""
    build = PlanBuilder()
    grad_output = build.storage("grad_output", (64, 32), Role.GRAD_OUTPUT)
    x = build.storage("x", (64, 16), Role.SAVED)
    weight = build.storage("w", (16, 32), Role.PARAMETER)
    mask = build.storage("mask", (64, 32), Role.SAVED)
    scale = build.storage("scale", (1,), Role.CONSTANT)
    build.values["scale"] = b"\x00\x00\x80?"
    x_t = build.view("x.t", x, (16, 64), (1, 16))
    w_t = build.view("w.t", weight, (32, 16), (1, 32))
    scaled = build.storage("scaled", (64, 32))
    masked = build.storage("masked", (64, 32))
    grad_w = build.storage("grad_w", (16, 32), Role.PARAMETER_GRADIENT)
    grad_x = build.storage("grad_x", (64, 16), Role.GRADIENT)
    mul = "aten.mul.Tensor"
    build.step("mul", mul, (TensorRef(grad_output), TensorRef(scale)), scaled, over=grad_output, source="model.py:7")
    build.step("mul_1", mul, (TensorRef(scaled), TensorRef(mask)), masked, over=scaled, source="model.py:7")
    build.step("mm", "aten.mm.default", (TensorRef(x_t), TensorRef(masked)), grad_w, source="model.py:6")
    build.step("mm_1", "aten.mm.default", (TensorRef(masked), TensorRef(w_t)), grad_x, source="model.py:6")
    return build.build(formula=Formula(16384, 20480))


def odd_arguments() -> tuple[Argument, ...]:
    """One of each kind of argument, the awkward values among them."""
    return (
        0,
        -1,
        2**63 - 1,
        -(2**63),
        True,
        False,
        None,
        0.5,
        1.0,
        -0.0,
        1e308,
        5e-324,
        float("inf"),
        float("-inf"),
        "",
        'quote " and \\ and é and \u2028',
        Dtype("bfloat16"),
        (),
        (1, (TensorRef(2), Dtype("float32")), (True, 1, 1.0)),
    )


def synthetic_plan(storages: int, *, width: int = 256, depth: int = 200) -> Plan:
    """Training steps of networks of at most ``depth`` layers: each a triangle of saved activations."""
    build = PlanBuilder(mode="joint")
    value = build.storage("input.0", (width, 64), Role.INPUT)
    layers = max(1, storages // 8)
    for start in range(0, layers, depth):
        value = _network(build, value, range(start, min(start + depth, layers)), width)
    build.storages[build.tensors[value].storage] = Storage("grad.input.0", width * 64 * 4, Role.GRADIENT)
    return build.build()


def _network(build: PlanBuilder, value: int, layers: range, width: int) -> int:
    saved: list[tuple[int, int]] = []
    relu, mm = "aten.relu.default", "aten.mm.default"
    for layer in layers:
        name = f"layers.{layer}"
        weight = build.storage(f"{name}.weight", (64, 1 + layer % 7), Role.PARAMETER)
        wide = build.storage(f"{name}.wide", (width, 64 * (1 + layer % 3)))
        build.step(f"mm_{layer}", mm, (TensorRef(value), TensorRef(weight)), wide, source="model.py:12")
        out = build.storage(f"{name}.out", (width, 64))
        build.step(f"relu_{layer}", relu, (TensorRef(wide),), out, source="model.py:13")
        saved.append((weight, value))
        value = out
    gradient = build.storage(f"loss.{layers.start}", (width, 64))
    build.step(f"loss_{layers.start}", relu, (TensorRef(value),), gradient)
    for layer, (weight, activation) in reversed(list(zip(layers, saved, strict=True))):
        name = f"layers.{layer}"
        grad_w = build.storage(f"{name}.weight.grad", (64, 1 + layer % 7))
        build.step(f"grad_w_{layer}", mm, (TensorRef(activation), TensorRef(gradient)), grad_w)
        norm = build.storage(f"{name}.norm", (1,))
        build.step(f"norm_{layer}", relu, (TensorRef(grad_w),), norm)
        scratch = build.storage(f"{name}.scratch", (width, 16), Role.WORKSPACE)
        masked = build.storage(f"{name}.masked", (width, 64))
        arguments = (TensorRef(gradient), 2.0)
        build.step(f"mask_{layer}", "aten.mul.Tensor", arguments, masked, over=gradient, workspaces=(scratch,))
        gradient = build.storage(f"{name}.grad", (width, 64))
        build.step(f"grad_x_{layer}", mm, (TensorRef(masked), TensorRef(weight)), gradient)
    return gradient


#: Options of `traced_plan` that differ in what they hold: donated storages, slices, outputs, many inputs.
TRACED = (("materialized",), ("sliced",), ("traced", "joint"), ("materialized", "joint", 0.0), ("auto", "forward"))


@cache
def traced_plan(strategy: str, mode: str = "backward", dropout: float = 0.1) -> Plan:
    """A real plan: self-attention of B=2, N=4, L=32, H=64, traced and planned, never run."""
    from planner import plan, trace
    from runtime.attention import build_attention

    module, x = build_attention(2, 4, 32, 64, dropout=dropout, causal=True)
    return plan(trace(module, (x,), mode=mode), strategy=strategy)
