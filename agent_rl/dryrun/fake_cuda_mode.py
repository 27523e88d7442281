"""Runs torch's operations on a GPU that is not there: floats have shapes alone, integers have their values too.

Routes are integers and known before a pass, so all that depends on them (how many tokens an expert gets, and goes to
which rank) comes out as it would, and Megatron runs unchanged. What is asked of floats (a norm, whether all are finite)
is answered with 1 and True. Memory, floating-point operations, bytes that are read and written, and waits of the host
are counted in a ledger. A copy between host and GPU makes the host wait unless it says ``non_blocking``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # names its operators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from agent_rl.dryrun.usage import Ledger
from agent_rl.errors import TrainerError

_HOST_BYTES = 64 << 20
"""Larger tensors of the host have no memory either."""
_aten = torch.ops.aten
Args = tuple[Any, ...]


class _NoDevice(FakeTensorMode):
    avoid_device_init = True  # whatever torch.cuda.is_available says: nothing is ever made on a device


class Rehearsal(TorchDispatchMode):
    """Inside, a tensor that names a GPU has no memory; ``ledger`` counts."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.fake = _NoDevice(allow_non_fake_inputs=True)

    def __enter__(self) -> Rehearsal:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made on the host and moved
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if options.pop("pin_memory", None):
            self.ledger.pinned += _power_of_two(_bytes_of(func, args, options))
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        named = str(options.get("device", "")).startswith("cuda")
        large = not given and not named and _bytes_of(func, args, options) > _HOST_BYTES
        if not (named or large or any(isinstance(tensor, FakeTensor) for tensor in given)):
            return func(*args, **options)
        handler = _HANDLERS.get(func)
        made = handler(self, func, args, options) if handler else self.plain(func, args, options)
        self._count(func, args, options, made)
        return made

    def plain(self, func: Any, args: Args, options: dict[str, Any]) -> Any:
        """Run ``func`` on shapes, and on values where all that it is given has them."""
        with self.fake:
            made = func(*args, **options)
        outs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, FakeTensor)]
        values: Any = [None] * len(outs)
        if outs and all(_counts(out) for out in outs) and _known(args, options):
            values = tree_leaves(func(*_values(args), **_values(_on_host(options))))
        for out, value in zip(outs, values, strict=True):  # what is written in place has the old value no more
            out.value = value  # type: ignore[attr-defined]
        return made

    def on_device(self, value: Tensor, device: Any = "cuda") -> Tensor:
        """A tensor of the device that has ``value``."""
        with self.fake:
            made = torch.empty(value.shape, dtype=value.dtype, device=device)
        made.value = value  # type: ignore[attr-defined]
        return made

    def _count(self, func: Any, args: Args, options: dict[str, Any], made: Any) -> None:
        given, outs = _on_device((args, options)), _on_device(made)
        for out in outs:
            self.ledger.made(out.untyped_storage())
        packet = func._overloadpacket
        if outs and not (func.is_view or packet in _FREE or func in _BETWEEN):
            precision = next((_PRECISIONS[each.dtype] for each in given if each.dtype in _PRECISIONS), "")
            flops = _flops(func, args, options, made)
            self.ledger.ran(flops, _moved(given, outs, lookup=packet in _LOOKUPS), precision)


def _on_device(tree: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]


def _flops(func: Any, args: Args, options: dict[str, Any], made: Any) -> int:
    packet = func._overloadpacket
    if packet in _FLOPS:
        return _FLOPS[packet](args, options)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **options, out_val=made))


def _moved(given: Sequence[FakeTensor], outs: Sequence[FakeTensor], *, lookup: bool) -> int:
    """Bytes that are read and written; of a lookup the rows alone that are taken."""
    written = sum(_extent(out) for out in outs)
    return written + (written if lookup else sum(_extent(each) for each in given))


def _extent(tensor: FakeTensor) -> int:
    """A tensor's bytes, each once where it repeats some."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def host_shape(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the host without memory, within the running :class:`Rehearsal`."""
    with _running().fake:
        return torch.empty(tuple(shape), dtype=dtype)


def _running() -> Rehearsal:
    found = [each for each in _get_current_dispatch_mode_stack() if isinstance(each, Rehearsal)]
    return found[-1]


def value_of(tensor: Tensor) -> Tensor | None:
    """A tensor's values on the host, where they are known."""
    return getattr(tensor, "value", None) if isinstance(tensor, FakeTensor) else tensor


def need_value(tensor: Tensor, what: str) -> Tensor:
    """As :func:`value_of`. Raises TrainerError where they are not known."""
    value = value_of(tensor)
    if value is None:
        raise TrainerError(f"{what} depends on numbers that only a GPU would compute ({tuple(tensor.shape)})")
    return value


def install(ledger: Ledger) -> None:
    """Answer what Python asks of a tensor without memory, in this process."""
    fake: Any = FakeTensor
    plain = torch.tensor

    def tensor(data: Any, *args: Any, device: Any = None, **options: Any) -> Tensor:
        if isinstance(data, list):  # torch reads tensors in it one by one, and the host waits for each
            data = tree_map_only(FakeTensor, float, data)
        made = plain(data, *args, **options)  # on the host: what asks for it there is said of this thread alone
        return made if device is None else made.to(device)

    torch.tensor = tensor
    fake.data_ptr = lambda self: 0
    fake.numpy = lambda self, **_: np.broadcast_to(np.zeros((), _numpy_dtype(self)), tuple(self.shape))
    fake.tolist = lambda self: self.cpu().tolist()
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    optimizer._foreach_supported_types.append(FakeTensor)  # else an optimizer makes no lists of temporaries


def _numpy_dtype(tensor: Tensor) -> Any:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype


def _counts(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point


def _known(args: Args, options: dict[str, Any]) -> bool:
    given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    return all(value_of(tensor) is not None for tensor in given)


def _values(tree: Any) -> Any:
    return tree_map_only(Tensor, value_of, tree)


def _on_host(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"device": torch.device("cpu")} if "device" in options else options


def _bytes_of(func: Any, args: Args, options: dict[str, Any]) -> int:
    if func not in (_aten.empty.memory_format, _aten.zeros.default):
        return 0
    dtype = options.get("dtype") or torch.get_default_dtype()
    return int(np.prod(args[0], dtype=np.int64)) * dtype.itemsize


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _item(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.device.type == "cuda":
        mode.ledger.copied(tensor.element_size(), waits=True)
    if (value := value_of(tensor)) is not None:
        return value.item()
    if tensor.dtype.is_floating_point:
        return 1.0
    return False if tensor.dtype == torch.bool else need_value(tensor, "a number")


def _to_copy(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    source, to = args[0], torch.device(options.get("device") or args[0].device)
    if to.type != source.device.type:
        mode.ledger.copied(source.nbytes, waits=not options.get("non_blocking"))
    elif to.type == "cuda":
        mode.ledger.ran(0, source.nbytes + source.numel() * (options.get("dtype") or source.dtype).itemsize, "")
    if to.type == "cpu" and source.device.type == "cuda":
        if (value := value_of(source)) is not None:
            return value.to(options.get("dtype") or value.dtype, copy=True)
        with mode.fake:
            shape = torch.empty(source.shape, dtype=options.get("dtype") or source.dtype, device="cpu")
        return shape if shape.nbytes > _HOST_BYTES else torch.zeros(shape.shape, dtype=shape.dtype)
    made = mode.plain(func, args, options)
    value = value_of(source)
    if value is not None and _counts(made):
        made.value = value.to(made.dtype, copy=True)
    return made


def _copy(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    target, source = args[:2]
    if target.device.type != source.device.type:
        mode.ledger.copied(target.nbytes, waits=not (args[2:] and args[2]))
    elif target.device.type == "cuda":
        mode.ledger.ran(0, 2 * target.nbytes, "")
    if not isinstance(target, FakeTensor):
        value = value_of(source)
        return target if value is None else target.copy_(value)
    with mode.fake:
        func(*args, **options)
    kept, value = value_of(target), value_of(source)
    if value is None or not _counts(target):
        target.value = None  # type: ignore[attr-defined]
    elif kept is None:
        target.value = torch.empty(target.shape, dtype=target.dtype).copy_(value)  # type: ignore[attr-defined]
    else:
        kept.copy_(value)
    return target


def _nonzero(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.ledger.waited()
    return mode.on_device(need_value(args[0], "nonzero").nonzero())


def _masked_select(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.ledger.waited()
    _one_device(func, args)
    source, mask = args
    chosen = need_value(mask, "masked_select")
    if (value := value_of(source)) is not None:
        return mode.on_device(value.masked_select(chosen))
    count = int(chosen.expand(source.shape).sum())
    with mode.fake:
        return torch.empty(count, dtype=source.dtype, device="cuda")


def _by_places(at: int) -> Callable[..., Any]:
    """Masks among the indices at argument ``at`` become the places that they name."""

    def handle(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
        indices: list[Tensor | None] = []
        for index in args[at]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
            else:
                mode.ledger.waited()
                places = need_value(index, "an index by a mask").nonzero().unbind(1)
                indices += [mode.on_device(place) for place in places]
        return mode.plain(func, (*args[:at], indices, *args[at + 1 :]), options)

    return handle


def _topk(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """A router's own choice is not known: it is taken to spread tokens evenly."""
    made = mode.plain(func, args, options)
    rows, experts, chosen = made[1].numel() // args[1], args[0].shape[-1], args[1]
    spread = torch.arange(rows)[:, None] * chosen + torch.arange(chosen)
    made[1].value = (spread % experts).view(made[1].shape)
    return made


def _zeros_like(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """Megatron's routing map begins as zeros of the scores' dtype."""
    made = mode.plain(func, args, options)
    one = torch.zeros((), dtype=made.dtype)
    made.value = torch.zeros(made.shape, dtype=made.dtype) if _counts(made) else one.expand(made.shape)
    return made


def _repeat_interleave(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    return mode.on_device(torch.repeat_interleave(need_value(args[0], "repeat_interleave")))


def _equal(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    mode.ledger.waited()
    _one_device(func, args)
    return not _known(args, options) or bool(torch.equal(*_values(args)))


def _grouped_product(mode: Rehearsal, func: Any, args: Args, options: dict[str, Any]) -> Any:
    """torch's shapes are those of the bfloat16 kernel, whose operands' strides they check. Of other precisions the host
    reads the groups' ends and multiplies them one by one."""
    if args[0].dtype == torch.bfloat16:
        return mode.plain(func, args, options)
    mode.ledger.waited()
    with mode.fake:
        narrow = [tensor.to(torch.bfloat16) for tensor in args[:2]]
        return func(*narrow, *args[2:], **options).to(args[0].dtype)


def _one_device(func: Any, args: Args) -> None:
    kinds = {tensor.device.type for tensor in args if tensor.ndim}
    if len(kinds) > 1:
        raise RuntimeError(f"{func}: tensors of the host and of the GPU ({', '.join(sorted(kinds))}) in one operation")


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: _item,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _by_places(1),
    _aten.index_put.default: _by_places(1),
    _aten.index_put_.default: _by_places(1),
    _aten.topk.default: _topk,
    _aten.zeros_like.default: _zeros_like,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.equal.default: _equal,
    _aten._grouped_mm.default: _grouped_product,
}
_BETWEEN = (_aten._to_copy.default, _aten.copy_.default, _aten._local_scalar_dense.default)
"""Counted by their handlers, for they may go from one device to another."""
_FREE = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten._unsafe_view, _aten.lift_fresh)
"""Read and write nothing, beside views."""
_LOOKUPS = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
_PRECISIONS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def _grouped(args: Args, options: dict[str, Any]) -> int:
    """``[N, K] x [E, K, M]``, or of a weight's gradient ``[K, N] x [N, M]``: each row meets one expert."""
    left, right = args[:2]
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


def _attended(heads: int, width: int, ends: Sequence[Tensor]) -> int:
    queries, keys = (need_value(end, "attention").diff().tolist() for end in ends)
    pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(queries, keys, strict=True))
    return 4 * pairs * heads * width


def _attention(args: Args, options: dict[str, Any]) -> int:
    query = args[0]
    return _attended(query.shape[1], query.shape[2], [args[3], args[4]])


def _attention_backward(args: Args, options: dict[str, Any]) -> int:
    query = args[1]
    return _attended(query.shape[1], query.shape[2], [args[6], args[7]]) * 5 // 2


_FLOPS: dict[Any, Callable[[Args, dict[str, Any]], int]] = {
    torch.ops.torch_attn._varlen_attn: _attention,
    torch.ops.torch_attn._varlen_attn_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
    _aten.addmm_: lambda args, options: 2 * args[1].shape[0] * args[1].shape[1] * args[2].shape[1],
}
