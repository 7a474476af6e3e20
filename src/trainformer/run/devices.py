"""What a run knows about the devices that it uses, for logs and callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trainformer.utils.processes import resident_bytes


class RunDevices(ABC):
    """The part of a run that describes its devices. Each backend says what it knows of its own."""

    def memory_gb(self) -> float | None:
        """Peak memory of the device; resident memory of the process where it has none of its own."""
        peak = self.peak_memory_gb
        return (resident_bytes() / 1e9 or None) if peak is None else peak

    @property
    @abstractmethod
    def peak_memory_gb(self) -> float | None:
        """Peak memory of the accelerator, or None without one."""

    @property
    @abstractmethod
    def accelerator(self) -> str | None:
        """The vendor's name of the accelerator, or None on a CPU."""

    @property
    @abstractmethod
    def num_devices(self) -> int:
        """Over how many devices the run is spread."""

    @abstractmethod
    def flops_per_sample(self) -> float | None:
        """FLOPs of an optimizer step per sample, over all devices; None if they cannot be counted. Changes nothing."""
