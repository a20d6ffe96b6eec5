"""The hardware limits, as one table: what a kernel may use, and the rates a cost model needs.

Limits are those of the CUDA programming guide's compute-capability tables (9.0 and 10.0); rates are
the vendor's dense figures. Nothing here is measured; measured figures live in records.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

KIB = 1024
WARP = 32  # lanes


@dataclass(frozen=True)
class Device:
    """One GPU. Sizes are bytes, rates are per second, registers are 32 bit."""

    name: str
    arch: str  # ptxas target: sm_90a, sm_100a
    sms: int
    smem_per_sm: int
    smem_per_block: int  # the most that one block may ask for (opt-in)
    smem_reserved: int  # taken by the system from every block
    registers_per_sm: int
    registers_per_thread: int
    threads_per_block: int
    warps_per_sm: int
    blocks_per_sm: int
    tmem_columns: int  # 128 lanes x 32 bit each; 0 where there is no tensor memory
    max_cluster: int  # portable
    named_barriers: int
    l2_bytes: int
    hbm_bytes_per_s: float
    tflops_16bit: float  # dense, 16-bit operands, float32 accumulation
    clock_ghz: float  # the clock at which tflops_16bit holds
    mma_flops_per_cycle: int  # per SM, 16-bit operands

    @property
    def has_tmem(self) -> bool:
        return self.tmem_columns > 0

    def register_share(self, threads: Any) -> Any:
        """Registers of a thread, at the most, where so many threads share those of an SM."""
        share = self.registers_per_sm // threads // 8 * 8
        return np.minimum(share, self.registers_per_thread)

    def resident_blocks(self, smem: Any, registers: Any, threads: Any, tmem: Any = 0) -> Any:
        """Blocks that an SM holds at a time, by shared memory (bytes), threads and TMEM columns of
        a block and registers of a thread: arrays over candidates, or numbers."""
        limits = (
            np.where(tmem, self.tmem_columns // np.maximum(tmem, 1), self.blocks_per_sm),
            self.registers_per_sm // (registers * threads),
            self.warps_per_sm * WARP // threads,
            self.smem_per_sm // (smem + self.smem_reserved),
            self.blocks_per_sm,
        )
        return np.minimum.reduce(np.broadcast_arrays(*limits))


_COMMON = {
    "smem_per_sm": 228 * KIB,
    "smem_per_block": 227 * KIB,
    "smem_reserved": 1 * KIB,
    "registers_per_sm": 65536,
    "registers_per_thread": 255,
    "threads_per_block": 1024,
    "warps_per_sm": 64,
    "blocks_per_sm": 32,
    "max_cluster": 8,
    "named_barriers": 16,
}

B200 = Device(
    name="b200", arch="sm_100a", sms=148, tmem_columns=512, l2_bytes=126 * 10**6,
    hbm_bytes_per_s=8.0e12, tflops_16bit=2250.0, clock_ghz=1.85, mma_flops_per_cycle=8192,
    **_COMMON,
)  # fmt: skip
H200 = Device(
    name="h200", arch="sm_90a", sms=132, tmem_columns=0, l2_bytes=60 * 10**6,
    hbm_bytes_per_s=4.8e12, tflops_16bit=989.0, clock_ghz=1.83, mma_flops_per_cycle=4096,
    **_COMMON,
)  # fmt: skip
H100 = Device(
    name="h100", arch="sm_90a", sms=132, tmem_columns=0, l2_bytes=50 * 10**6,
    hbm_bytes_per_s=3.35e12, tflops_16bit=989.0, clock_ghz=1.83, mma_flops_per_cycle=4096,
    **_COMMON,
)  # fmt: skip

DEVICES: dict[str, Device] = {d.name: d for d in (B200, H200, H100)}


def device(name: str) -> Device:
    """The device of that name; unknown names raise KeyError and list the known ones."""
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise KeyError(f"unknown device {name!r}; known: {', '.join(DEVICES)}") from None
