"""A Triton driver for a chip that is not there: launches compile for it, and are recorded instead of run.

Used in a process where the interpreter is off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

#: Shared memory of one block and threads of one block that the chip is said to have (an H100's).
SHARED_NBYTES, THREADS = 227 << 10, 1024


class Recorder(DriverBase):
    """Says what the target is, and keeps ``(kernel, grid, warps)`` of every launch, and every kernel compiled."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.target = target
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self.compiled: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_NBYTES},
            load_binary=self._load,
            unload_module=lambda _: None,
        )

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, *_: Any) -> None:
            self.launches.append((source.name, (x, y, z), metadata.num_warps))

        return launch

    def _load(self, name: str, *_: Any) -> tuple[Any, ...]:
        self.compiled.append(name)
        return object(), object(), 0, 0, THREADS


def install(target: GPUTarget) -> Recorder:
    """Make a recorder Triton's active driver."""
    recorder = Recorder(target)
    driver.set_active(recorder)
    return recorder
