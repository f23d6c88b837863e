# SPDX-License-Identifier: Apache-2.0
"""Ray Train: a TorchTrainer with two workers over gloo."""

from __future__ import annotations

import os
import sys


def train(config):
    sys.path.insert(0, config["programs"])
    import ray.train
    import ray.train.torch
    import said
    import torch
    import torch.distributed as dist

    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(7)
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(6):
        x = torch.randn(4, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        said.loss(rank, loss.item())
    for ranks in ([0], [0, 1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            said.loss(rank, total.item())
    ray.train.report({"loss": loss.item()})
    said.done(rank)


if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR")
    trainer = TorchTrainer(
        train,
        train_loop_config={"programs": os.path.dirname(os.path.abspath(__file__))},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=os.environ["FRAMEWORKS_FOLDER"], name="ray"),
    )
    trainer.fit()
    ray.shutdown()
