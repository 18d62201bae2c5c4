"""Names of the context's attributes in AMD's Iris, for programs that were written for that (docs/porting.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class Aliases(ABC):
    """The part of the context that gives other attributes a second name."""

    rank: int
    world_size: int
    device: torch.device
    num_sms: int

    @property
    @abstractmethod
    def heap_bases(self) -> torch.Tensor:
        """Addresses of all heaps."""

    @property
    def cur_rank(self) -> int:
        """As :attr:`rank`."""
        return self.rank

    @property
    def num_ranks(self) -> int:
        """As :attr:`world_size`."""
        return self.world_size

    def get_rank(self) -> int:
        """As :attr:`rank`."""
        return self.rank

    def get_num_ranks(self) -> int:
        """As :attr:`world_size`."""
        return self.world_size

    def get_heap_bases(self) -> torch.Tensor:
        """As :attr:`heap_bases`."""
        return self.heap_bases

    def get_device(self) -> torch.device:
        """As :attr:`device`."""
        return self.device

    def get_cu_count(self) -> int:
        """As :attr:`num_sms`."""
        return self.num_sms
