"""Replaces torch.cuda in a process without CUDA. Only for the process of a dry-run rank."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from agent_rl.dryrun.usage import UsageRecorder
from agent_rl.train.megatron.cpu import Stream, without_compile


def install(usage: UsageRecorder) -> None:
    """Install the replacements and import ``megatron.core``, which must not be imported before."""
    _patch_torch(usage)
    tensor: Any = torch.Tensor
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def resized(self: Any, size: int) -> None:
        resize(self, size)
        usage.update_size(self)

    storage.resize_ = resized
    tensor.record_stream = lambda self, stream: None
    with without_compile(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.gpt")
    from megatron.core.jit import disable_jit_fuser
    from megatron.core.tensor_parallel import random

    disable_jit_fuser()
    for name, function in (("_get_cuda_rng_state", _state), ("_set_cuda_rng_state", _set_state)):
        setattr(random, name, function)


class WaitingStream(Stream):
    """A stream or event that counts the waits of the host in ``usage``."""

    def __init__(self, usage: UsageRecorder, *_: object, **__: object) -> None:
        self._usage = usage

    def synchronize(self) -> None:
        """See torch's method."""
        self._usage.add_sync()

    def elapsed_time(self, _end: object) -> float:
        """See torch's method. The simulation measures no time."""
        return 0.0


def _state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)


def _set_state(*_: Any, **__: Any) -> None:
    """Does nothing: no random number is drawn."""


def _patch_torch(usage: UsageRecorder) -> None:
    cuda: Any = torch.cuda
    runtime: Any = torch._C
    stream = functools.partial(WaitingStream, usage)
    current = stream()
    runtime._cuda_setDevice = lambda index: None  # torch.cuda.set_device keeps its checks
    cuda._lazy_init = lambda: None
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(uuid="simulated")
    cuda.ipc_collect = _set_state
    cuda.Stream = cuda.Event = stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: current
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.synchronize = lambda *_, **__: usage.add_sync()
    cuda.empty_cache = _set_state
    handles: Any = reductions
    handles.reduce_tensor = _reduce_tensor
    cuda.get_rng_state, cuda.set_rng_state, cuda.manual_seed = _state, _set_state, _set_state
    cuda.cudart = functools.partial(
        SimpleNamespace, cudaHostRegister=_register_pinned(usage), cudaHostUnregister=lambda _: 0
    )


def _reduce_tensor(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """The arguments of torch's ``rebuild_cuda_tensor`` up to the device. A simulated storage has no handle."""
    layout = (torch.Tensor, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    return reductions.rebuild_cuda_tensor, (*layout, torch.UntypedStorage, tensor.dtype, tensor.device.index)


def _register_pinned(usage: UsageRecorder) -> Any:
    def register(start: int, size: int, flags: int) -> int:
        usage.pinned += size
        return 0

    return register
