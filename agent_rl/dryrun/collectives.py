"""Replaces collectives: one process simulates a rank of a world of any size.

Results are computed as if every other rank had this rank's values. Sent bytes are counted by group: the bytes that
leave this rank, with the ring algorithm for reductions and gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from agent_rl.dryrun.engines import FakeEngines
from agent_rl.dryrun.fake_cuda_mode import value_of
from agent_rl.dryrun.job import ENGINE_GROUP
from agent_rl.dryrun.usage import UsageRecorder

_SYNC_GROUP_PREFIX = "agent-rl-"
"""Prefix of the names of the groups that a weight sync creates with engines."""


class _FinishedWork:
    """The handle of a finished collective."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Collectives:
    """Replacements for the functions of torch.distributed in this process.

    ``activation_shape``: shape of the tensors between pipeline stages. ``last_stage_objects``: returns the objects that
    the last stage broadcasts. ``gather_objects``: from this rank's object, the objects of all ranks of a group (None:
    all equal this rank's). ``engines``: the engines of weight syncs.
    """

    def __init__(self, usage: UsageRecorder) -> None:
        self._usage = usage
        self.names: dict[tuple[int, ...], str] = {}
        self.activation_shape: tuple[int, ...] = ()
        self.last_stage_objects: Callable[[], Any] = list
        self.gather_objects: Callable[[Any], list[Any]] | None = None
        self.engines: FakeEngines | None = None

    def install(self) -> None:
        """Replace the functions. Call before Megatron is imported."""
        dist: Any = torch.distributed
        c10d: Any = dist.distributed_c10d
        make, group, helper = dist.init_process_group, dist.new_group, c10d._new_process_group_helper
        dist.TCPStore = lambda *_, **__: FakeStore()
        dist.init_process_group = lambda backend, **options: make("fake", **options)
        dist.new_group = lambda ranks=None, timeout=None, *_, **__: group(ranks, timeout, "fake")
        c10d.rendezvous = lambda _url, rank, size, **_: iter([(FakeStore(), rank, size)])
        c10d._new_process_group_helper = lambda size, rank, ranks, _, *rest, **options: helper(
            size, rank, ranks, c10d.Backend("fake"), *rest, **options
        )
        self._report_group_exit(c10d)
        names = (
            "all_reduce broadcast all_gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single isend "
            "irecv send recv batch_isend_irecv barrier all_gather_object broadcast_object_list"
        )
        for name in names.split():
            for module in (dist, c10d):  # P2POp of c10d compares with the functions of c10d
                setattr(module, name, getattr(self, name))
        dist._all_gather_base, dist._reduce_scatter_base = self.all_gather_into_tensor, self.reduce_scatter_tensor

    def _report_group_exit(self, c10d: Any) -> None:
        """Report to the engines when the trainer leaves their group."""
        for name, aborted in (("destroy_process_group", False), ("_abort_process_group", True)):
            plain = getattr(c10d, name)

            def leave(group: Any = None, *, plain: Any = plain, aborted: bool = aborted) -> None:
                if group is not None and self.engines is not None and self.name_of(group)[0] == ENGINE_GROUP:
                    self.engines.leave_group(aborted=aborted)
                plain(group)

            setattr(c10d, name, leave)
            if hasattr(torch.distributed, name):
                setattr(torch.distributed, name, leave)

    def name_of(self, group: Any) -> tuple[str, int]:
        """Returns a group's name and size."""
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if group is not None and group.group_name.startswith(_SYNC_GROUP_PREFIX):
            return ENGINE_GROUP, len(ranks)
        return self.names.get(ranks, "world" if len(ranks) > 1 else "alone"), len(ranks)

    def _count_sent(self, group: Any, size: float) -> int:
        name, ranks = self.name_of(group)
        if ranks > 1:
            self._usage.add_collective(name, int(size))
        return ranks

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _FinishedWork:
        ranks = torch.distributed.get_world_size(group)
        self._count_sent(group, 2 * tensor.nbytes * (ranks - 1) / ranks)
        value = value_of(tensor)
        if value is not None and 0 not in value.stride() and op in (None, torch.distributed.ReduceOp.SUM):  # not zeros
            value.mul_(ranks)
        return _FinishedWork()

    def broadcast(
        self, tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False, **_: Any
    ) -> _FinishedWork:
        self._count_sent(group, tensor.nbytes)
        if self.engines is not None and self.name_of(group)[0] == ENGINE_GROUP:
            self._usage.add_sync()  # the publisher polls until the broadcast is done
            self.engines.broadcast(tensor.nbytes)
        return _FinishedWork()

    def all_gather(self, out: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> _FinishedWork:
        self._count_sent(group, tensor.nbytes * (len(out) - 1))
        for part in out:
            part.copy_(tensor)
        return _FinishedWork()

    def all_gather_into_tensor(
        self, out: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> _FinishedWork:
        ranks = self._count_sent(group, out.nbytes - tensor.nbytes)
        if value_of(tensor) is not None:
            out.copy_(torch.cat([tensor] * ranks).view(out.shape))
        return _FinishedWork()

    def reduce_scatter_tensor(
        self, out: Tensor, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> _FinishedWork:
        self._count_sent(group, tensor.nbytes - out.nbytes)
        return _FinishedWork()

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> _FinishedWork:
        ranks = torch.distributed.get_world_size(group)
        own = torch.distributed.get_rank(group)
        splits = input_split_sizes if input_split_sizes is not None else [len(tensor) // ranks] * ranks
        if sum(int(size) for size in splits) != len(tensor):
            raise RuntimeError(f"all_to_all_single: splits {list(splits)} of a tensor of {len(tensor)} rows")
        self._count_sent(group, tensor.nbytes * (1 - int(splits[own]) / max(1, len(tensor))))
        return _FinishedWork()

    def isend(self, tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> _FinishedWork:
        self._count_sent(group, tensor.nbytes)
        return _FinishedWork()

    def irecv(self, tensor: Tensor, *_: Any, **__: Any) -> _FinishedWork:
        if not tensor.dtype.is_floating_point:  # the shape of the next tensor
            tensor.copy_(torch.tensor(self.activation_shape, dtype=tensor.dtype))
        return _FinishedWork()

    send, recv = isend, irecv

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[_FinishedWork]:
        return [each.op(each.tensor, each.peer, group=each.group) for each in operations]

    def barrier(self, *_: Any, **__: Any) -> _FinishedWork:
        return _FinishedWork()

    def all_gather_object(self, out: list[Any], item: Any, group: Any = None) -> None:
        out[:] = [item] * len(out) if self.gather_objects is None else self.gather_objects(item)

    def broadcast_object_list(self, objects: list[Any], *_: Any, **__: Any) -> None:
        if objects[0] is None:
            objects[0] = self.last_stage_objects()
