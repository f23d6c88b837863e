# SPDX-License-Identifier: Apache-2.0
"""A simulated NCCL: torch's own group-creation code runs on it, on a machine without a GPU.

It takes the place of `ProcessGroupNCCL` in `torch.distributed.distributed_c10d`, as a backend of the groups
that torch makes; a group may have gloo, the real one, beside it.  Tensors stay where they are, on the CPU.
What it keeps of the real one is what the defects are made of:

- an NCCL group made with a device connects at once, any other on its first collective;
- a group with `options.split_from` connects by splitting that group's communicator, which takes a call
  of every rank of the parent; any other exchanges an id through its own store, under its own name;
- `split_group` splits the parent's communicator, which takes a call of every rank of the parent: one that is
  in no part calls without a colour.  Gloo beside it splits through the store, under the new group's name;
- a split while `new_group` makes a group holds Python's global lock, as the real one does;
- a collective runs over the ranks that the communicator has, right or wrong;
- a communicator that has been used is finalized when its group is shut down, which waits for all its ranks.

It differs in that a collective is over when `wait` returns, where the real one may still run on the GPU.  And
all tensors being on the CPU, a group with gloo beside NCCL does on NCCL what would go over gloo for a tensor
of the CPU; a group of gloo alone is gloo's.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import select
import socket
import sys
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.distributed as dist

from torchcommshim.commands.verify.switchboard import Exchange, Finalize, Join, Request, Seat, Split

_address = ""  # of the job's switchboard


def install(address: str, devices: int) -> None:
    """Put simulated NCCL in place of the real one in this process, before it makes a group.

    Args:
        address: of the job's switchboard (`switchboard()`).
        devices: how many GPUs this machine shall seem to have.
    """
    global _address
    _address = address
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    for module in (c10d, dist):
        module.ProcessGroupNCCL = SimulatedNCCL
        module.is_nccl_available = lambda: True
    c10d.ProcessGroup = SimulatedGroup  # what torch makes; `dist.ProcessGroup`, which all are, stays
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)  # None in a build without NCCL
    if "_create_nccl_process_group" in vars(c10d):  # torch 2.14 on: backends are made through a registry
        c10d._DistributedBackendOptions = SimpleNamespace  # the C++ one takes no group to split from
        c10d._FR_SELF_RECORDING_BACKENDS.add("nccl")  # else a recorder asks C++ for the group's name
        c10d.Backend.register_backend(
            "nccl",
            c10d._create_nccl_process_group,
            extended_api=True,
            devices=["cuda"],
            _backend_type=dist.ProcessGroup.BackendType.NCCL,
        )
    torch.cuda.set_device = lambda device: None
    # Where torch makes groups it is to find a GPU; elsewhere, where tensors would go to it, none.
    found: dict[str, Any] = {"cuda": _With(torch.cuda, is_available=lambda: True)}
    if hasattr(torch, "accelerator"):
        found["accelerator"] = _With(
            torch.accelerator,
            is_available=lambda: True,
            current_accelerator=lambda *_, **__: torch.device("cuda"),
            device_count=lambda: devices,
        )
    device_mesh: Any = sys.modules["torch.distributed.device_mesh"]
    c10d.torch = device_mesh.torch = _With(torch, **found)


class _With:
    """A module, with some of its names replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class SimulatedOptions:
    """The fields of `ProcessGroupNCCL.Options` that torch's Python code reads and sets."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.split_from: SimulatedNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedOptions:
        return copy.copy(self)  # the group to split from is referred to, as in C++


class _Pending:
    """A request on its way."""

    def __init__(self, request: Request) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(_address)
        self._stream = self._socket.makefile("rwb")
        pickle.dump(request, self._stream)
        self._stream.flush()

    def answer(self, keep_gil: bool = False) -> Any:
        """Wait for the answer, if need be without letting any other Python thread run."""
        if keep_gil:
            _wait_until_readable(self._socket.fileno())
        with self._socket, self._stream:
            return pickle.load(self._stream)  # noqa: S301 - from the job's own switchboard


class _PollFd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def _wait_until_readable(descriptor: int) -> None:
    """Block until there is something to read.  PyDLL, unlike CDLL, keeps the global lock meanwhile."""
    waited = _PollFd(descriptor, select.POLLIN, 0)
    while ctypes.PyDLL(None).poll(ctypes.byref(waited), 1, -1) < 0:
        pass  # a signal came; its Python handler, if any, runs here


class SimulatedWork(dist.Work):  # type: ignore[misc, unused-ignore]
    """A collective under way; `wait` returns once it is done."""

    def __init__(self, pending: _Pending, finish: Callable[[list[bytes]], None]) -> None:
        super().__init__()
        self._pending: _Pending | None = pending
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the other ranks, for ever if need be, and put the result in place."""
        if self._pending:
            self._finish(self._pending.answer())
            self._pending = None
        return True

    def is_completed(self) -> bool:
        """Has `wait` returned?"""
        return self._pending is None


class SimulatedNCCL:
    """Stands in for `ProcessGroupNCCL`: the backend of a group (`SimulatedGroup`) for tensors of the GPU."""

    Options = SimulatedOptions
    supports_splitting = True
    supports_coalescing = False
    uid = -1

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: SimulatedOptions | None = None
    ) -> None:
        self.options = options or SimulatedOptions()
        self.bound_device_id: torch.device | None = None
        self._store = store
        self._rank = rank
        self._size = size
        self._seat: Seat | None = None
        self._collectives = 0
        self._pairs: dict[int, Seat] = {}
        self._splits = 0
        self._used = False

    # What torch asks of a backend while it makes and ends groups.

    def name(self) -> str:
        return "nccl"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def comm_split_count(self) -> int:
        """How often this rank has taken part in a split of this communicator."""
        return self._splits

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def shutdown(self) -> None:
        """Finalize the communicator: once it has been used, that takes all its ranks.

        https://github.com/pytorch/pytorch/issues/190396 saw it for those that had run a collective.
        """
        if self._seat and self._used:
            _Pending(Finalize(self._seat.communicator, self._seat.rank)).answer()

    def abort(self) -> None:
        pass

    _shutdown = abort  # what torch calls up to 2.5, where the end of a group waits for nobody

    # Connecting.

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Connect now.  torch asks for it where the group is bound to `device`."""
        self.bound_device_id = device
        self._communicator(keep_gil=True)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split of this communicator as a rank that will not be in the new one."""
        self._take_part(None, 0, keep_gil=True)

    def split(self, store: dist.Store, ranks: list[int], options: SimulatedOptions) -> SimulatedNCCL | None:
        """Split this communicator for `split_group`, as C++ does; None on a rank that is not in `ranks`."""
        if self._rank not in ranks:
            self._take_part(None, 0)
            return None
        options.split_from, options.split_color = self, min(ranks)
        child = SimulatedNCCL(store, ranks.index(self._rank), len(ranks), options)
        child._communicator()
        return child

    def _take_part(self, color: int | None, key: int, keep_gil: bool = False) -> Seat | None:
        """Take this rank's part in a split of this communicator; its place in the new one, if any."""
        mine = self._communicator(keep_gil)
        self._splits += 1
        seat: Seat | None = _Pending(Split(mine.communicator, mine.rank, color, key)).answer(keep_gil)
        return seat

    def _communicator(self, keep_gil: bool = False) -> Seat:
        if self._seat is None:
            rank, size = self._rank, self._size
            self._seat = self._split(rank, keep_gil) or self._meet("0", rank, size, keep_gil)
        return self._seat

    def _pair(self, peer: int) -> Seat:
        """The communicator of two ranks over which unbatched sends and receives go."""
        if peer not in self._pairs:
            low, high = sorted((self._rank, peer))
            place = int(self._rank == high)
            seat = self._split(place) if _POINT_TO_POINT_SPLITS else None
            self._pairs[peer] = seat or self._meet(f"{low}:{high}", place, 2)
        return self._pairs[peer]

    def _split(self, key: int, keep_gil: bool = False) -> Seat | None:
        """Split from the parent; None if there is none."""
        if self.options.split_from is None:
            return None
        return self.options.split_from._take_part(self.options.split_color, key, keep_gil)

    def _meet(self, key: str, rank: int, size: int, keep_gil: bool = False) -> Seat:
        """Connect without a parent: the first rank makes an id, the group's store tells the others."""
        if rank == 0:
            self._store.set(key, uuid.uuid4().hex)
        seat: Seat = _Pending(Join(self._store.get(key).decode(), rank, size)).answer(keep_gil)
        return seat

    # Collectives.

    def _begun(self) -> Seat:
        """A collective begins: as NCCL's, it is counted before its group connects."""
        self._collectives += 1
        return self._communicator()

    def _exchange(
        self, seat: Seat, label: str, tensor: torch.Tensor | None, finish: Callable[[list[bytes]], None]
    ) -> SimulatedWork:
        payload = b"" if tensor is None else _pack(tensor)
        self._used = True
        return SimulatedWork(_Pending(Exchange(seat.communicator, seat.rank, label, payload)), finish)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> SimulatedWork:
        (tensor,) = tensors
        reduce = _reduction(options.reduceOp)

        def finish(payloads: list[bytes]) -> None:
            tensor.copy_(reduce(torch.stack([_unpack(payload) for payload in payloads])))

        return self._exchange(self._begun(), "allreduce", tensor, finish)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> SimulatedWork:
        (tensor,) = tensors
        root = options.rootRank
        seat = self._begun()

        def finish(payloads: list[bytes]) -> None:
            tensor.copy_(_unpack(payloads[root]))

        return self._exchange(seat, f"broadcast from {root}", tensor, finish)

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None
    ) -> SimulatedWork:
        (output,), (tensor,) = outputs, tensors

        def finish(payloads: list[bytes]) -> None:
            for place, payload in zip(output, payloads):
                place.copy_(_unpack(payload))

        return self._exchange(self._begun(), "allgather", tensor, finish)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> SimulatedWork:
        """All-gather into one tensor."""

        def finish(payloads: list[bytes]) -> None:
            output.copy_(torch.cat([_unpack(payload).flatten() for payload in payloads]).view_as(output))

        return self._exchange(self._begun(), "allgather", tensor, finish)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any
    ) -> SimulatedWork:
        """Reduce one tensor, and keep this rank's part."""
        reduce = _reduction(options.reduceOp)
        seat = self._begun()

        def finish(payloads: list[bytes]) -> None:
            parts = [_unpack(payload).flatten().chunk(seat.size)[seat.rank] for payload in payloads]
            output.copy_(reduce(torch.stack(parts)).view_as(output))

        return self._exchange(seat, "reduce_scatter", tensor, finish)

    def gather_several(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> SimulatedWork:
        """`gather_single` for one tensor, in the form that functional collectives use."""
        (output,), (tensor,) = outputs, tensors
        return self.gather_single(output, tensor, options)

    def reduce_scatter_several(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any
    ) -> SimulatedWork:
        """`reduce_scatter_single` for one tensor, in the form that functional collectives use."""
        (output,), (tensor,) = outputs, tensors
        return self.reduce_scatter_single(output, tensor, options)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._exchange(self._begun(), "barrier", None, lambda payloads: None)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        return self._exchange(self._pair(peer), "point to point", tensors[0], lambda payloads: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        seat = self._pair(peer)

        def finish(payloads: list[bytes]) -> None:
            tensors[0].copy_(_unpack(payloads[1 - seat.rank]))

        return self._exchange(seat, "point to point", None, finish)


class SimulatedGroup(dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """The process group that torch makes, and registers backends with; one of them may be simulated NCCL.

    torch's C++ code calls back into Python for a subclass of ProcessGroup.  For a backend in Python it does
    not: C++ cannot hold it, so what C++ would look up among a group's backends is looked up here.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *options: Any) -> None:
        super().__init__(rank, size)  # C++ takes a store of no subclass
        self._store = store
        self._rank = rank
        self._size = size
        self._nccl: SimulatedNCCL | None = None
        self._others: dict[str, tuple[Any, Any]] = {}  # device's type -> backend's type, backend
        self._name = self._description = ""

    def get_group_store(self) -> dist.Store:
        return self._store

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any = None) -> None:
        if isinstance(backend, SimulatedNCCL):
            self._nccl = backend
        else:
            super()._register_backend(device, backend_type, backend)
            self._others[device.type] = backend_type, backend

    def _get_backend(self, device: torch.device) -> Any:
        if self._nccl is None:
            return super()._get_backend(device)
        _, backend = self._others.get(torch.device(device).type, (None, self._nccl))
        return backend

    def _first_backend(self) -> Any:
        return self._nccl or next(iter(self._others.values()))[1]

    @property
    def _device_types(self) -> list[torch.device]:
        if self._nccl is None:
            types: list[torch.device] = super()._device_types
            return types
        return [torch.device("cpu"), torch.device("cuda")]  # torch prefers the first for its own tensors

    def name(self) -> str:
        name: str = self._first_backend().name()
        return name

    getBackendName = name  # noqa: N815 - torch's C++ code calls it

    def rank(self) -> int:  # torch 2.15 asks the default backend, among those that C++ holds
        return self._rank

    getRank = rank  # noqa: N815

    def size(self) -> int:
        return self._size

    getSize = size  # noqa: N815

    # The C++ properties of these names want a backend that C++ holds.
    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name
        if self._others:
            super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        super()._set_group_desc(description)

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        number: int = self._first_backend()._get_sequence_number_for_group()
        return number

    def shutdown(self) -> None:
        super().shutdown()
        if self._nccl:
            self._nccl.shutdown()

    def abort(self) -> None:
        super().abort()

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> SimulatedGroup | None:
        """C++ `ProcessGroup::splitGroup`, which `dist.split_group` calls from torch 2.9 on.

        It splits the backends in the order of their devices' types, the CPU's first.  Gloo's part is done by
        C++; simulated NCCL's cannot be, since C++ does not hold it.
        """
        name, description = group_name or f"{self._name}:split:{ranks}", group_desc or ""
        store = dist.PrefixStore(f"{name}/", self._store)
        wanted = {device.type for device in device_types or ()} or {*self._others, "cuda"}
        backends = []
        for device_type, (backend_type, backend) in self._others.items():
            if device_type in wanted:
                split = _split_gloo(self._store, self, backend, ranks, timeout, name)
                backends.append((device_type, backend_type, split))
        if self._nccl and "cuda" in wanted:
            options = copy.copy(opts or self._nccl.options)
            options.group_name = name
            options._timeout = timeout or options._timeout
            split = self._nccl.split(store, list(ranks), options)
            backends.append(("cuda", dist.ProcessGroup.BackendType.NCCL, split))
        if self.rank() not in ranks:
            return None
        child = SimulatedGroup(store, ranks.index(self.rank()), len(ranks))
        for device_type, backend_type, backend in backends:
            child._set_default_backend(backend_type)  # NCCL's, the last, where it is there
            child._register_backend(torch.device(device_type), backend_type, backend)
        child._set_group_name(name)
        child._set_group_desc(description)
        return child


def _split_gloo(
    store: dist.Store, group: SimulatedGroup, backend: Any, ranks: list[int], timeout: Any, name: str
) -> Any:
    """Have C++ split a group that has this gloo backend and no other; the new backend, None if not in it.

    The options are gloo's own default ones, as they are in C++ too while it is handed NCCL's
    (https://github.com/pytorch/pytorch/issues/182057).
    """
    if group.rank() not in ranks:  # gloo asks nothing of them
        return None
    alone = dist.ProcessGroup(store, group.rank(), group.size())
    alone._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    alone._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    child = alone.split_group(list(ranks), timeout=timeout, opts=options, group_name=name, group_desc="")
    return child and child._get_backend(torch.device("cpu"))


# The collectives of simulated NCCL, and under which names torch's Python code calls them on a group, or its
# C++ code for functional collectives; the names of all releases.
_COLLECTIVES = {
    "allreduce": ("allreduce",),
    "broadcast": ("broadcast",),
    "allgather": ("allgather",),
    "gather_single": ("_allgather_base", "all_gather_single"),
    "gather_several": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "reduce_scatter_single": ("_reduce_scatter_base", "reduce_scatter_single"),
    "reduce_scatter_several": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    "barrier": ("barrier",),
    "send": ("send",),
    "recv": ("recv",),
}


def _handed_on(name: str, collective: str) -> Any:
    """A method for `SimulatedGroup`: does it on simulated NCCL where the group has it, else as torch does."""

    def method(self: SimulatedGroup, *arguments: Any, **named: Any) -> Any:
        if self._nccl is None:
            return getattr(dist.ProcessGroup, name)(self, *arguments, **named)
        return getattr(self._nccl, collective)(*arguments, **named)

    # C++ calls back into Python for a method unless it is called from that method, known by the code's name.
    method.__code__ = method.__code__.replace(co_name=name)
    return method


for _collective, _names in _COLLECTIVES.items():
    for _name in _names:
        if hasattr(dist.ProcessGroup, _name):
            setattr(SimulatedGroup, _name, _handed_on(_name, _collective))


# torch 2.5 makes the communicator of a pair by splitting, as it makes the group's own
# (https://github.com/pytorch/pytorch/issues/139013).
_POINT_TO_POINT_SPLITS = torch.__version__.startswith("2.5.")


def _reduction(operation: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if operation == dist.ReduceOp.SUM:
        return lambda stacked: stacked.sum(0)
    if operation == dist.ReduceOp.MAX:
        return lambda stacked: stacked.amax(0)
    if operation == dist.ReduceOp.MIN:
        return lambda stacked: stacked.amin(0)
    if operation == dist.ReduceOp.AVG:
        return lambda stacked: stacked.mean(0)
    raise NotImplementedError(f"simulated NCCL reduces with SUM, AVG, MAX and MIN, not with {operation}")


def _pack(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), stream)
    return stream.getvalue()


def _unpack(payload: bytes) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(payload), weights_only=True)
    return tensor
