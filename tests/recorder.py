# SPDX-License-Identifier: Apache-2.0
"""One rank of a world of any size, in one process: torch's own creation code over a backend that records.

The backend can be split and connects to nobody, so creations return at once on members and non-members.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda", 0)

events: list[tuple] = []
on_create: list = []  # functions, called once each, while a group's backend is made


class Recorder(dist.ProcessGroup):
    """Records the splits and connections that torch asks for.

    A subclass of ProcessGroup stands for the whole group: torch uses it in place of its own.
    """

    supports_splitting = True
    options = None
    group_name = group_desc = ""

    def __init__(self, options):
        super().__init__(options.group_rank, options.group_size)
        self.ranks = list(options.global_ranks_in_group)
        if on_create:
            on_create.pop()()

    def name(self):
        return "recorder"

    getBackendName = name  # noqa: N815 - C++ calls it

    def _get_backend(self, device):
        return self

    def split_group(self, ranks, group_name=None, **_):
        """Of the whole group, as C++ does it from 2.9 on; a rank that is left out gets None."""
        if self.rank() not in ranks:
            events.append(("nocolor", group_name))
            return None
        events.append(("split", group_name))
        options = SimpleNamespace(
            group_rank=ranks.index(self.rank()),
            group_size=len(ranks),
            global_ranks_in_group=[self.ranks[rank] for rank in ranks] if self.ranks else ranks,
        )
        part = Recorder(options)
        part.group_name = group_name
        return part

    def get_group_store(self):
        return dist.HashStore()

    def _set_sequence_number_for_group(self):
        pass

    def perform_nocolor_split(self, device):
        events.append(("nocolor", device))

    def eager_connect_single_device(self, device):
        self.bound_device_id = device
        events.append(("connect", self.ranks))

    def _set_group_name(self, name):
        self.group_name = name

    def _set_group_desc(self, description):
        pass

    def shutdown(self):
        pass

    _shutdown = shutdown


for _name in ("recorder", "other", "nccl-recorder"):
    dist.Backend.register_backend(
        _name, lambda options, _: Recorder(options), extended_api=True, devices=["cuda"]
    )


@contextmanager
def world(*arguments, size=4, rank=0, **keywords):
    """A world of `size` ranks of which this process is `rank`."""
    if not arguments:
        keywords = {"backend": "recorder", "device_id": DEVICE, **keywords}
    if "store" not in keywords:
        keywords["store"] = dist.HashStore()
    dist.init_process_group(*arguments, rank=rank, world_size=size, **keywords)
    events.clear()
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
