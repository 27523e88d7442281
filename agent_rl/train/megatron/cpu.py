"""Lets Megatron-core 0.16.1 run on a machine without CUDA, over gloo.

Megatron uses CUDA streams, events, random states and ``device="cuda"`` in code that needs no GPU.
:func:`install_cpu_shim` replaces them for the whole process. It is for trainer processes only, refuses a process with
CUDA, and must run before ``megatron.core`` is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from agent_rl.errors import TrainerError
from agent_rl.utils.imports import quick_imports

_CPU = torch.device("cpu")
# Modules of megatron.core that pass device="cuda" to a tensor factory in a training step.
_LITERAL_CUDA = (
    "pipeline_parallel.schedules",
    "optimizer.optimizer",
    "optimizer.grad_scaler",
    "optimizer.clip_grads",
    "transformer.moe.moe_utils",
    "utils",
)


def install_cpu_shim() -> None:
    """Make ``megatron.core`` runnable without CUDA. Idempotent. Raises TrainerError where CUDA exists."""
    if torch.cuda.is_available():
        raise TrainerError("the CPU shim replaces torch.cuda functions, and this process has CUDA")
    if getattr(torch.cuda.current_device, "agent_rl_shim", False):
        return
    if "megatron.core" in sys.modules:
        raise TrainerError("the CPU shim must be installed before megatron.core is imported")
    warm_up_vector_functions()
    _patch_torch_cuda()
    with quick_imports(), without_compile(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns that Transformer Engine and Apex are absent
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.models.gpt")
    _patch_megatron()


def warm_up_vector_functions() -> None:
    """Call a vectorized MKL function once in one thread. If two threads make the first call, one may get values that
    are off by 1e-4: seen in 10 % of processes for the cosines of a rotary table, with torch 2.13 and idle cores."""
    torch.zeros(1).cos()


class Stream:
    """A CUDA stream or event on a CPU, where all work is complete when a method is called."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def wait_stream(self, _other: object) -> None: ...

    def wait_event(self, _event: object) -> None: ...

    def wait(self, _stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, _stream: object = None) -> None: ...

    def record_event(self, _event: object = None) -> Stream:
        return self

    def query(self) -> bool:
        return True


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    stream = Stream()

    def current_device() -> torch.device:
        return _CPU

    current_device.agent_rl_shim = True  # type: ignore[attr-defined]
    cuda.current_device = current_device
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: stream
    cuda.stream = lambda *_args, **_kwargs: contextlib.nullcontext()
    cuda.synchronize = lambda *_args, **_kwargs: None
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    _patch_tensor()


def _patch_tensor() -> None:
    # The mixed-precision and distributed optimizers compare param.type() with 'torch.cuda.FloatTensor' and the like.
    plain: Callable[..., Any] = torch.Tensor.type

    @functools.wraps(plain)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]
    # Megatron moves tied embeddings on the last pipeline stage and reloaded optimizer state with .cuda().
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[assignment, method-assign]


def _patch_megatron() -> None:
    from megatron.core.jit import disable_jit_fuser
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    disable_jit_fuser()
    # Megatron warns when the CPU random state changes in a GPU context; here both are the same state.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    for name in _LITERAL_CUDA:
        module = importlib.import_module(f"megatron.core.{name}")
        module.torch = _CpuTorch()  # type: ignore[attr-defined]


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Megatron's own function returns CPU tensors even where its caller needs numpy (the splits of an all-to-all).
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _CpuTorch(ModuleType):
    """The torch module, whose tensor factories replace ``device="cuda"`` by the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in ("zeros", "ones", "empty", "tensor", "full", "arange"):
            return value

        @functools.wraps(value)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
            return value(*args, **kwargs)

        return factory


@contextlib.contextmanager
def without_compile() -> Iterator[None]:
    """A context to import Megatron without torch.compile, which takes minutes on a CPU."""
    compile_ = torch.compile
    torch.compile = lambda model=None, **_kwargs: model if model is not None else (lambda f: f)  # type: ignore
    try:
        yield
    finally:
        torch.compile = compile_
