# SPDX-License-Identifier: Apache-2.0
"""A simulated NCCL: torch's own group-creation code runs on it, on a machine without a GPU.

It takes the place of `ProcessGroupNCCL` in `torch.distributed.distributed_c10d`.  Tensors stay where
they are, on the CPU.  What it keeps of the real one is what the defects are made of:

- an NCCL group made with a device connects at once, any other on its first collective;
- a group with `options.split_from` connects by splitting that group's communicator, which takes a call
  of every rank of the parent; any other exchanges an id through its own store, under its own name;
- a split while a group is being made holds Python's global lock, as the real one does;
- a collective runs over the ranks that the communicator has, right or wrong.

It differs in that a collective is over when `wait` returns, where the real one may still run on the GPU.
"""

from __future__ import annotations

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

from torchcommshim.commands.verify.switchboard import Exchange, Join, Request, Seat, Split

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
    if hasattr(torch, "accelerator"):  # where init_process_group looks device_id up
        torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
        torch.accelerator.device_count = lambda: devices
    torch.cuda.set_device = lambda device: None


class SimulatedOptions:
    """The fields of `ProcessGroupNCCL.Options` that torch's Python code reads and sets."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.split_from: SimulatedNCCL | None = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""


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


class SimulatedNCCL(dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """Stands in for `ProcessGroupNCCL`.

    It is a process group and its own backend: torch's C++ code calls back into Python for a subclass of
    ProcessGroup, and for a subclass of Backend it does not.
    """

    Options = SimulatedOptions
    supports_splitting = True
    supports_coalescing = False
    uid = -1

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: SimulatedOptions | None = None
    ) -> None:
        super().__init__(rank, size)
        self._options = options or SimulatedOptions()
        self._description = "undefined"
        self._store = store
        self._seat: Seat | None = None
        self._pairs: dict[int, Seat] = {}

    # What torch asks of a group and of its backend while it makes and ends them.

    def name(self) -> str:
        return "nccl"

    getBackendName = name  # noqa: N815 - torch's C++ code calls it

    # The C++ properties of these names want a registered backend, or are not this group's.
    @property
    def options(self) -> SimulatedOptions:
        return self._options

    @property
    def group_name(self) -> str:
        return self.options.group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self.options.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> SimulatedNCCL:
        return self

    @property
    def _device_types(self) -> list[torch.device]:  # where tensors are that torch makes for a collective
        return [torch.device("cpu")]

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.options._timeout = timeout

    def shutdown(self) -> None:
        pass

    _shutdown = abort = shutdown

    # Connecting.

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Connect now.  torch asks for it where the group is bound to `device`."""
        self.bound_device_id = device
        self._communicator(keep_gil=True)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split of this communicator as a rank that will not be in the new one."""
        parent = self._communicator(keep_gil=True)
        _Pending(Split(parent.communicator, parent.rank, None, 0)).answer(keep_gil=True)

    def _communicator(self, keep_gil: bool = False) -> Seat:
        if self._seat is None:
            rank, size = self.rank(), self.size()
            self._seat = self._split(rank, keep_gil) or self._meet("0", rank, size, keep_gil)
        return self._seat

    def _pair(self, peer: int) -> Seat:
        """The communicator of two ranks over which unbatched sends and receives go."""
        if peer not in self._pairs:
            low, high = sorted((self.rank(), peer))
            place = int(self.rank() == high)
            seat = self._split(place) if _POINT_TO_POINT_SPLITS else None
            self._pairs[peer] = seat or self._meet(f"{low}:{high}", place, 2)
        return self._pairs[peer]

    def _split(self, key: int, keep_gil: bool = False) -> Seat | None:
        """Split from the parent; None if there is none."""
        if self.options.split_from is None:
            return None
        parent = self.options.split_from._communicator(keep_gil)
        request = Split(parent.communicator, parent.rank, self.options.split_color, key)
        seat: Seat = _Pending(request).answer(keep_gil)
        return seat

    def _meet(self, key: str, rank: int, size: int, keep_gil: bool = False) -> Seat:
        """Connect without a parent: the first rank makes an id, the group's store tells the others."""
        if rank == 0:
            self._store.set(key, uuid.uuid4().hex)
        seat: Seat = _Pending(Join(self._store.get(key).decode(), rank, size)).answer(keep_gil)
        return seat

    # Collectives.

    def _exchange(
        self, seat: Seat, label: str, tensor: torch.Tensor | None, finish: Callable[[list[bytes]], None]
    ) -> SimulatedWork:
        payload = b"" if tensor is None else _pack(tensor)
        return SimulatedWork(_Pending(Exchange(seat.communicator, seat.rank, label, payload)), finish)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> SimulatedWork:
        (tensor,) = tensors
        reduce = _reduction(options.reduceOp)

        def finish(payloads: list[bytes]) -> None:
            tensor.copy_(reduce(torch.stack([_unpack(payload) for payload in payloads])))

        return self._exchange(self._communicator(), "allreduce", tensor, finish)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> SimulatedWork:
        (tensor,) = tensors
        root = options.rootRank
        seat = self._communicator()

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

        return self._exchange(self._communicator(), "allgather", tensor, finish)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._exchange(self._communicator(), "barrier", None, lambda payloads: None)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        return self._exchange(self._pair(peer), "point to point", tensors[0], lambda payloads: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> SimulatedWork:
        seat = self._pair(peer)

        def finish(payloads: list[bytes]) -> None:
            tensors[0].copy_(_unpack(payloads[1 - seat.rank]))

        return self._exchange(seat, "point to point", None, finish)


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
    raise NotImplementedError(f"simulated NCCL reduces with SUM, MAX and MIN, not with {operation}")


def _pack(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), stream)
    return stream.getvalue()


def _unpack(payload: bytes) -> torch.Tensor:
    tensor: torch.Tensor = torch.load(io.BytesIO(payload), weights_only=True)
    return tensor
