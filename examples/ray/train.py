# SPDX-License-Identifier: Apache-2.0
"""Workers of Ray that make process groups, each with the shim; see runtime_env.yaml beside it.

    ray job submit --runtime-env examples/ray/runtime_env.yaml -- python examples/ray/train.py --workers 8

With `--backend gloo` it runs without GPUs.
"""

from __future__ import annotations

import argparse
import socket

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Worker:
    """One rank."""

    def address(self) -> tuple[str, int]:
        """Where rank 0 may be met: this host, and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def train(self, backend: str, address: tuple[str, int], rank: int, size: int) -> dict[str, object]:
        """Make a world and a group, add up the ranks in it, and tell what the shim did."""
        import torch
        import torch.distributed as dist

        # Ray shows each worker its own GPU alone, as number 0.
        device = torch.device("cuda", 0) if backend == "nccl" else None
        where = f"tcp://{address[0]}:{address[1]}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, device_id=device)
        group = dist.new_group([0, size - 1])
        total = torch.tensor(rank, device=device)
        if rank in (0, size - 1):
            dist.all_reduce(total, group=group)
        dist.barrier()
        dist.destroy_process_group()

        import torchcommshim

        return {"rank": rank, "sum": int(total), "shim": torchcommshim.status()}


def main() -> None:
    """Start the workers and print what each tells."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="nccl")
    chosen = parser.parse_args()

    ray.init()
    gpus = 1 if chosen.backend == "nccl" else 0
    # All or none: of a part of the ranks, each would wait for those that have not been placed.
    places = placement_group([{"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}] * chosen.workers)
    if not places.wait(timeout_seconds=60):
        parser.error(f"the cluster has no room for {chosen.workers} workers at once")
    worker = ray.remote(
        num_cpus=1, num_gpus=gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(places)
    )(Worker)
    workers = [worker.remote() for _ in range(chosen.workers)]
    address = ray.get(workers[0].address.remote())
    ranks = [
        worker.train.remote(chosen.backend, address, rank, len(workers))
        for rank, worker in enumerate(workers)
    ]
    for told in ray.get(ranks):
        print(told)


if __name__ == "__main__":
    main()
