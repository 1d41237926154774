"""Kernels in Triton's interpreter on a memory of 2⁶⁴ bytes of which only the tensors' elements exist.

Tensors of a few elements may lie anywhere, with any strides: an offset that wraps at 2³¹ reaches an address that does
not exist, and so does a load or store outside its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter

from runtime.kernels.triton.launch import Launch


class _Pointer:
    """What a kernel is handed for a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


class SparseMemory:
    """Elements by address."""

    def __init__(self) -> None:
        self.elements: dict[int, Any] = {}
        self.bases: dict[int, tuple[torch.Tensor, int]] = {}

    def place(self, value: torch.Tensor, address: int, strides: Sequence[int]) -> torch.Tensor:
        """A tensor without data, of the value's shape; its elements exist from ``address`` on, and nothing else."""
        tensor = torch.empty_strided(value.shape, tuple(strides), dtype=value.dtype, device="meta")
        self.bases[tensor.untyped_storage()._cdata] = (tensor, address)
        for index, item in zip(self._indices(value.shape), value.reshape(-1).numpy(), strict=True):
            self.elements[self._address(tensor, address, index)] = item
        return tensor

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a placed tensor, dense."""
        address = self.address(tensor)
        values = [self.elements[self._address(tensor, address, index)] for index in self._indices(tensor.shape)]
        return torch.tensor(np.array(values)).view(tensor.shape)

    def run(self, *launches: Launch | None) -> None:
        """Run launches whose tensors were placed here; raise `KeyError` (wrapped) at an address that does not exist."""
        builder = type(interpreter.interpreter_builder)
        with (
            mock.patch.object(interpreter.GridExecutor, "_init_args_hst", lambda _, args, kwargs: (args, kwargs)),
            mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", return_value=None),
            mock.patch.object(builder, "create_masked_load", self._load),
            mock.patch.object(builder, "create_masked_store", self._store),
        ):
            for launch in launches:
                arguments = [self._pointer(item) for item in launch.arguments]
                launch.kernel[launch.grid](*arguments, **launch.setting.options())

    def _pointer(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return _Pointer(self.address(item), item.dtype)

    def address(self, tensor: torch.Tensor) -> int:
        """Where a placed tensor, or a view of one, begins."""
        _, base = self.bases[tensor.untyped_storage()._cdata]
        return base + tensor.storage_offset() * tensor.element_size()

    def _load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        kind = ptrs.get_element_ty()
        dtype = interpreter._get_np_dtype(kind)
        found = np.zeros(ptrs.data.shape, dtype) if other is None else np.array(other.data, dtype=dtype)
        found = np.broadcast_to(found, ptrs.data.shape).copy()
        for place in np.argwhere(np.broadcast_to(mask.data, ptrs.data.shape)):
            found[tuple(place)] = self.elements[int(ptrs.data[tuple(place)])]
        return interpreter.TensorHandle(found, kind)

    def _store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        for place in np.argwhere(np.broadcast_to(mask.data, ptrs.data.shape)):
            address = int(ptrs.data[tuple(place)])
            if address not in self.elements:
                raise KeyError(address)
            self.elements[address] = np.broadcast_to(value.data, ptrs.data.shape)[tuple(place)]

    @staticmethod
    def _indices(shape: Sequence[int]) -> list[tuple[int, ...]]:
        return list(product(*(range(size) for size in shape)))

    @staticmethod
    def _address(tensor: torch.Tensor, base: int, index: tuple[int, ...]) -> int:
        places = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        return base + places * tensor.element_size()
