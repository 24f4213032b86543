"""Collectives between the tensor-parallel ranks of one replica."""

import os
from abc import ABC, abstractmethod
from datetime import timedelta

import torch
import torch.distributed as dist


class Comm(ABC):
    """The ranks 0..size-1; every rank makes the same calls in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`; may be written into `x`."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] -> [..., size * n]: all ranks' `x` along the last axis, in order of rank."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, written into everybody's."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. To be called before the interpreter ends: a thread of the group that gives back a tensor
        while Python is finalizing aborts the process."""


class LocalComm(Comm):
    """One rank: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def close(self) -> None:
        pass


class GlooComm(Comm):
    """Ranks on one host through torch.distributed's gloo, met at a TCP port on loopback."""

    def __init__(self, rank: int, size: int, port: int, timeout: float) -> None:
        # gloo would look up the host name to choose an interface, and listen there; the ranks share a host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        self.rank = rank
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # Not gloo's own sum: from three ranks on, its order depends on where in the buffer a number stands, so that a
        # row's result would depend on the rows before it.
        total, *others = self._parts(x)
        for part in others:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts(x), dim=-1)

    def _parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Of all ranks, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        dist.destroy_process_group()


def make_comm(rank: int, size: int, port: int, timeout: float = 300.0) -> Comm:
    """The group of `size` ranks; rank 0 listens on 127.0.0.1:`port`. `timeout`: seconds a collective may wait."""
    return LocalComm() if size == 1 else GlooComm(rank, size, port, timeout)
