"""Answers collectives as if the other ranks were there: each has what this one has, where numbers are asked for.

A world of any size needs only this process. Bytes are counted by the group that they are sent in: what leaves this
rank, a ring's share for reductions and gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from agent_rl.dryrun.engines import StandInEngines
from agent_rl.dryrun.fake_cuda_mode import value_of
from agent_rl.dryrun.names import ENGINES
from agent_rl.dryrun.usage import Ledger

Objects = Callable[[], Any]
_UPDATES = "agent-rl-"
"""How the names of the groups begin that a weight sync makes with engines."""


class _Done:
    """The work of a collective that is over."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Collectives:
    """What takes the place of torch.distributed's functions in this process.

    ``stage_shape``: of the tensors that pipeline stages hand on. ``objects``: what the last stage would have made.
    ``gathered``: from this rank's object, those that all ranks of a group have (None: all have this one's).
    ``engines``: who takes part in weight syncs.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.names: dict[tuple[int, ...], str] = {}
        self.stage_shape: tuple[int, ...] = ()
        self.objects: Objects = list
        self.gathered: Callable[[Any], list[Any]] | None = None
        self.engines: StandInEngines | None = None

    def install(self) -> None:
        """Must come before anything of Megatron is imported."""
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
        self._watch_leaving(c10d)
        names = (
            "all_reduce broadcast all_gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single isend "
            "irecv send recv batch_isend_irecv barrier all_gather_object broadcast_object_list"
        )
        for name in names.split():
            for module in (dist, c10d):  # the latter's P2POp compares with its own
                setattr(module, name, getattr(self, name))
        dist._all_gather_base, dist._reduce_scatter_base = self.all_gather_into_tensor, self.reduce_scatter_tensor

    def _watch_leaving(self, c10d: Any) -> None:
        """Tell the engines when the group with them is left."""
        for name, aborted in (("destroy_process_group", False), ("_abort_process_group", True)):
            plain = getattr(c10d, name)

            def leave(group: Any = None, *, plain: Any = plain, aborted: bool = aborted) -> None:
                if group is not None and self.engines is not None and self.name_of(group)[0] == ENGINES:
                    self.engines.left(aborted=aborted)
                plain(group)

            setattr(c10d, name, leave)
            if hasattr(torch.distributed, name):
                setattr(torch.distributed, name, leave)

    def name_of(self, group: Any) -> tuple[str, int]:
        """A group's name and size."""
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if group is not None and group.group_name.startswith(_UPDATES):
            return ENGINES, len(ranks)
        return self.names.get(ranks, "world" if len(ranks) > 1 else "alone"), len(ranks)

    def _sent(self, group: Any, size: float) -> int:
        name, ranks = self.name_of(group)
        if ranks > 1:
            self._ledger.sent(name, int(size))
        return ranks

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Done:
        ranks = torch.distributed.get_world_size(group)
        self._sent(group, 2 * tensor.nbytes * (ranks - 1) / ranks)
        value = value_of(tensor)
        if value is not None and op in (None, torch.distributed.ReduceOp.SUM):
            value.mul_(ranks)
        return _Done()

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False, **_: Any) -> _Done:
        self._sent(group, tensor.nbytes)
        if self.engines is not None and self.name_of(group)[0] == ENGINES:
            self._ledger.waited()  # the publisher asks until it is over
            self.engines.take(tensor.nbytes)
        return _Done()

    def all_gather(self, out: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> _Done:
        self._sent(group, tensor.nbytes * (len(out) - 1))
        for part in out:
            part.copy_(tensor)
        return _Done()

    def all_gather_into_tensor(self, out: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> _Done:
        ranks = self._sent(group, out.nbytes - tensor.nbytes)
        if value_of(tensor) is not None:
            out.copy_(torch.cat([tensor] * ranks).view(out.shape))
        return _Done()

    def reduce_scatter_tensor(
        self, out: Tensor, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> _Done:
        self._sent(group, tensor.nbytes - out.nbytes)
        return _Done()

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> _Done:
        ranks = torch.distributed.get_world_size(group)
        own = torch.distributed.get_rank(group)
        splits = input_split_sizes if input_split_sizes is not None else [len(tensor) // ranks] * ranks
        if sum(int(size) for size in splits) != len(tensor):
            raise RuntimeError(f"all_to_all_single: splits {list(splits)} of a tensor of {len(tensor)} rows")
        self._sent(group, tensor.nbytes * (1 - int(splits[own]) / max(1, len(tensor))))
        return _Done()

    def isend(self, tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> _Done:
        self._sent(group, tensor.nbytes)
        return _Done()

    def irecv(self, tensor: Tensor, *_: Any, **__: Any) -> _Done:
        if not tensor.dtype.is_floating_point:  # the shape of what comes next
            tensor.copy_(torch.tensor(self.stage_shape, dtype=tensor.dtype))
        return _Done()

    send, recv = isend, irecv

    def batch_isend_irecv(self, operations: Sequence[Any]) -> list[_Done]:
        return [each.op(each.tensor, each.peer, group=each.group) for each in operations]

    def barrier(self, *_: Any, **__: Any) -> _Done:
        return _Done()

    def all_gather_object(self, out: list[Any], item: Any, group: Any = None) -> None:
        out[:] = [item] * len(out) if self.gathered is None else self.gathered(item)

    def broadcast_object_list(self, sandbox: list[Any], *_: Any, **__: Any) -> None:
        if sandbox[0] is None:
            sandbox[0] = self.objects()
