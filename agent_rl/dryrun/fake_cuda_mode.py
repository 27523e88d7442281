"""Runs torch's operations on a simulated GPU: float tensors have shapes only, integer tensors also have values.

Routes are integers and known before a pass, so everything that depends on them (tokens per expert, tokens sent to each
rank) is exact, and Megatron runs unchanged. Reading a float from the GPU gives 1.0, reading a boolean computed from
floats gives False. Memory, floating-point operations, bytes read and written, and waits of the host are recorded. A
copy between host and GPU makes the host wait unless it is ``non_blocking``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # registers its operators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from agent_rl.dryrun.usage import UsageRecorder
from agent_rl.errors import TrainerError

_MAX_HOST_BYTES = 64 << 20
"""Larger host tensors also get no memory."""
_aten = torch.ops.aten
Args = tuple[Any, ...]


class _DevicelessFakeMode(FakeTensorMode):
    avoid_device_init = True  # nothing is ever allocated on a device


class FakeCudaMode(TorchDispatchMode):
    """Inside, GPU tensors have no memory, and ``usage`` counts their operations."""

    def __init__(self, usage: UsageRecorder) -> None:
        super().__init__()
        self.usage = usage
        self.fake = _DevicelessFakeMode(allow_non_fake_inputs=True)

    def __enter__(self) -> FakeCudaMode:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is created on the host and moved
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if options.pop("pin_memory", None):
            self.usage.pinned += _power_of_two(_allocation_bytes(func, args, options))
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        on_gpu = str(options.get("device", "")).startswith("cuda")
        large = not tensors and not on_gpu and _allocation_bytes(func, args, options) > _MAX_HOST_BYTES
        if not (on_gpu or large or any(isinstance(tensor, FakeTensor) for tensor in tensors)):
            return func(*args, **options)
        handler = _HANDLERS.get(func)
        result = handler(self, func, args, options) if handler else self.run_fake(func, args, options)
        self._count(func, args, options, result)
        return result

    def run_fake(self, func: Any, args: Args, options: dict[str, Any]) -> Any:
        """Run ``func`` on shapes, and on values if all its inputs have values."""
        with self.fake:
            result = func(*args, **options)
        outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        values: Any = [None] * len(outs)
        if outs and all(_is_discrete(out) for out in outs) and _all_known(args, options):
            values = tree_leaves(func(*_values(args), **_values(_with_cpu_device(options))))
        for out, value in zip(outs, values, strict=True):  # an in-place operation invalidates the old value
            out.value = value  # type: ignore[attr-defined]
        return result

    def device_tensor(self, value: Tensor, device: Any = "cuda") -> Tensor:
        """Returns a GPU tensor with ``value``."""
        with self.fake:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        tensor.value = value  # type: ignore[attr-defined]
        return tensor

    def _count(self, func: Any, args: Args, options: dict[str, Any], result: Any) -> None:
        inputs, outs = _device_tensors((args, options)), _device_tensors(result)
        for out in outs:
            self.usage.track_storage(out.untyped_storage())
        packet = func._overloadpacket
        if outs and not (func.is_view or packet in _FREE or func in _COUNTED_BY_HANDLER):
            precision = next((_PRECISIONS[each.dtype] for each in inputs if each.dtype in _PRECISIONS), "")
            flops = _flops(func, args, options, result)
            moved = _moved_bytes(inputs, outs, lookup=packet in _LOOKUPS)
            attention = "attention" in packet.__name__ or "attn" in packet.__name__
            self.usage.add_operation(flops, moved, precision, attention=attention)


def _device_tensors(tree: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]


def _flops(func: Any, args: Args, options: dict[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in _FLOPS:
        return _FLOPS[packet](args, options)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **options, out_val=result))


def _moved_bytes(inputs: Sequence[FakeTensor], outs: Sequence[FakeTensor], *, lookup: bool) -> int:
    """Returns the bytes read and written; a lookup reads only the selected rows."""
    written = sum(_distinct_bytes(out) for out in outs)
    return written + (written if lookup else sum(_distinct_bytes(each) for each in inputs))


def _distinct_bytes(tensor: FakeTensor) -> int:
    """Returns a tensor's bytes; an expanded tensor counts its storage once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def host_shape(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a host tensor without memory, within the active :class:`FakeCudaMode`."""
    with _active_mode().fake:
        return torch.empty(tuple(shape), dtype=dtype)


def _active_mode() -> FakeCudaMode:
    return next(mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, FakeCudaMode))


def value_of(tensor: Tensor) -> Tensor | None:
    """Returns a tensor's values on the host, or None if they are unknown."""
    return getattr(tensor, "value", None) if isinstance(tensor, FakeTensor) else tensor


def require_value(tensor: Tensor, what: str) -> Tensor:
    """As :func:`value_of`. Raises TrainerError if the values are unknown."""
    value = value_of(tensor)
    if value is None:
        raise TrainerError(f"{what} depends on values that only a GPU would compute ({tuple(tensor.shape)})")
    return value


def install(usage: UsageRecorder) -> None:
    """Patch torch in this process so that Python code can read tensors without memory."""
    fake: Any = FakeTensor
    plain = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, list):  # torch reads tensors in a list one by one; the host waits for each
            data = tree_map_only(FakeTensor, float, data)
        on_host = plain(data, *args, **options)
        return on_host if device is None else on_host.to(device)

    torch.tensor = tensor
    fake.data_ptr = lambda self: 0
    fake.numpy = lambda self, **_: np.broadcast_to(np.zeros((), _numpy_dtype(self)), tuple(self.shape))
    fake.tolist = lambda self: self.cpu().tolist()
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    optimizer._foreach_supported_types.append(
        FakeTensor
    )  # optimizers then use their foreach implementation, with its temporaries


def _numpy_dtype(tensor: Tensor) -> Any:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


def _is_discrete(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point


def _all_known(args: Args, options: dict[str, Any]) -> bool:
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    return all(value_of(tensor) is not None for tensor in tensors)


def _values(tree: Any) -> Any:
    return tree_map_only(Tensor, value_of, tree)


def _with_cpu_device(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"device": torch.device("cpu")} if "device" in options else options


def _allocation_bytes(func: Any, args: Args, options: dict[str, Any]) -> int:
    if func not in (_aten.empty.memory_format, _aten.zeros.default):
        return 0
    dtype = options.get("dtype") or torch.get_default_dtype()
    return int(np.prod(args[0], dtype=np.int64)) * dtype.itemsize


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _item(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.device.type == "cuda":
        mode.usage.add_copy(tensor.element_size(), waits=True)
    if (value := value_of(tensor)) is not None:
        return value.item()
    if tensor.dtype.is_floating_point:
        return 1.0
    return False if tensor.dtype == torch.bool else require_value(tensor, "a number")


def _to_copy(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    source, to = args[0], torch.device(options.get("device") or args[0].device)
    if to.type != source.device.type:
        mode.usage.add_copy(source.nbytes, waits=not options.get("non_blocking"))
    elif to.type == "cuda":
        mode.usage.add_operation(
            0, source.nbytes + source.numel() * (options.get("dtype") or source.dtype).itemsize, ""
        )
    if to.type == "cpu" and source.device.type == "cuda":
        if (value := value_of(source)) is not None:
            return value.to(options.get("dtype") or value.dtype, copy=True)
        with mode.fake:
            shape = torch.empty(source.shape, dtype=options.get("dtype") or source.dtype, device="cpu")
        return shape if shape.nbytes > _MAX_HOST_BYTES else torch.zeros(shape.shape, dtype=shape.dtype)
    result = mode.run_fake(func, args, options)
    value = value_of(source)
    if value is not None and _is_discrete(result):
        result.value = value.to(result.dtype, copy=True)
    return result


def _copy(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    target, source = args[:2]
    if target.device.type != source.device.type:
        mode.usage.add_copy(target.nbytes, waits=not (args[2:] and args[2]))
    elif target.device.type == "cuda":
        mode.usage.add_operation(0, 2 * target.nbytes, "")
    if not isinstance(target, FakeTensor):
        value = value_of(source)
        return target if value is None else target.copy_(value)
    with mode.fake:
        func(*args, **options)
    old_value, value = value_of(target), value_of(source)
    if value is None or not _is_discrete(target):
        target.value = None  # type: ignore[attr-defined]
    elif old_value is None:
        target.value = torch.empty(target.shape, dtype=target.dtype).copy_(value)  # type: ignore[attr-defined]
    else:
        old_value.copy_(value)
    return target


def _nonzero(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.usage.add_sync()
    return mode.device_tensor(require_value(args[0], "nonzero").nonzero())


def _masked_select(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.usage.add_sync()
    _check_one_device(func, args)
    source, mask = args
    chosen = require_value(mask, "masked_select")
    if (value := value_of(source)) is not None:
        return mode.device_tensor(value.masked_select(chosen))
    count = int(chosen.expand(source.shape).sum())
    with mode.fake:
        return torch.empty(count, dtype=source.dtype, device="cuda")


def _masks_to_indices(position: int) -> Callable[..., Any]:
    """Handle an indexing operation: masks among the indices at argument ``position`` become integer indices."""

    def handle(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
        indices: list[Tensor | None] = []
        for index in args[position]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            else:
                mode.usage.add_sync()
                coordinates = require_value(index, "an index by a mask").nonzero().unbind(1)
                indices += [mode.device_tensor(each) for each in coordinates]
        return mode.run_fake(func, (*args[:position], indices, *args[position + 1 :]), options)

    return handle


def _topk(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """The values of a router's own choice are unknown: assume that it spreads tokens evenly."""
    result = mode.run_fake(func, args, options)
    rows, experts, top_k = result[1].numel() // args[1], args[0].shape[-1], args[1]
    spread = torch.arange(rows)[:, None] * top_k + torch.arange(top_k)
    result[1].value = (spread % experts).view(result[1].shape)
    return result


def _zeros_like(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """Gives also float tensors values: Megatron's routing map starts as zeros of the scores' dtype."""
    result = mode.run_fake(func, args, options)
    zero = torch.zeros((), dtype=result.dtype)
    result.value = torch.zeros(result.shape, dtype=result.dtype) if _is_discrete(result) else zero.expand(result.shape)
    return result


def _repeat_interleave(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    return mode.device_tensor(torch.repeat_interleave(require_value(args[0], "repeat_interleave")))


def _equal(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.usage.add_sync()
    _check_one_device(func, args)
    return not _all_known(args, options) or bool(torch.equal(*_values(args)))


def _grouped_product(mode: FakeCudaMode, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """torch's shape function is that of the bfloat16 kernel and checks the strides of its operands. In other precisions
    the host reads the groups' ends and multiplies group by group."""
    if args[0].dtype == torch.bfloat16:
        return mode.run_fake(func, args, options)
    mode.usage.add_sync()
    with mode.fake:
        narrow = [tensor.to(torch.bfloat16) for tensor in args[:2]]
        return func(*narrow, *args[2:], **options).to(args[0].dtype)


def _check_one_device(func: Any, args: Args) -> None:
    kinds = {tensor.device.type for tensor in args if tensor.ndim}
    if len(kinds) > 1:
        raise RuntimeError(f"{func}: tensors on host and GPU ({', '.join(sorted(kinds))}) in one operation")


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _masks_to_indices(1),
    _aten.index_put.default: _masks_to_indices(1),
    _aten.index_put_.default: _masks_to_indices(1),
    _aten.topk.default: _topk,
    _aten.zeros_like.default: _zeros_like,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.equal.default: _equal,
    _aten._grouped_mm.default: _grouped_product,
}
_COUNTED_BY_HANDLER = (_aten._to_copy.default, _aten.copy_.default, _aten._local_scalar_dense.default)
"""Their handlers count them, because they may copy between devices."""
_FREE = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten._unsafe_view, _aten.lift_fresh)
"""Operations that, like views, read and write nothing."""
_LOOKUPS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
_PRECISIONS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def _grouped(args: Args, options: dict[str, Any]) -> int:
    """``[N, K] x [E, K, M]``, or for a weight gradient ``[K, N] x [N, M]``: each row is multiplied with one expert."""
    left, right = args[:2]
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


def _attention_flops(heads: int, width: int, ends: Sequence[Tensor]) -> int:
    queries, keys = (require_value(end, "attention").diff().tolist() for end in ends)
    pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(queries, keys, strict=True))
    return 4 * pairs * heads * width


def _attention(args: Args, options: dict[str, Any]) -> int:
    query = args[0]
    return _attention_flops(query.shape[1], query.shape[2], [args[3], args[4]])


def _attention_backward(args: Args, options: dict[str, Any]) -> int:
    query = args[1]
    return _attention_flops(query.shape[1], query.shape[2], [args[6], args[7]]) * 5 // 2


_FLOPS: dict[Any, Callable[[Args, dict[str, Any]], int]] = {
    torch.ops.torch_attn._varlen_attn: _attention,
    torch.ops.torch_attn._varlen_attn_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
    _aten.addmm_: lambda args, options: 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1],
}
