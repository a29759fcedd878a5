"""One process or many: the same code trains under `torchrun`, one process a device.

Every process builds the same batches and draws the same noise, and takes its share of the
sequences. So many processes do what one would with the same batch, up to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maskgr.devices import pick_device


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int
    size: int
    device: torch.device

    @property
    def writes(self) -> bool:
        """Files and the terminal belong to one process."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes."""
        if self.size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(module, device_ids=devices)

    def total(self, value: Tensor) -> Tensor:
        """The sum of every process's `value`."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def agree(self, number: int) -> int:
        """The first process's number, everywhere: clocks differ."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """The processes that `torchrun` started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, pick_device(device))
        return
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, chosen)
    finally:
        dist.destroy_process_group()
