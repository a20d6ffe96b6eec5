"""The emulator runs what other compilers emit: Triton's and nvcc's PTX of kernels of our own.

Values decide, under several schedules. The ordering hazards that a run reports are compiler
practice against the letter of the ISA: they are pinned apart.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault, emulate
from tests.emulator.foreign.fixtures import NAMES, Fixture, load

# What Triton 3.6 leaves out, and where: a hazard's wording, the fixtures that show it.
HAZARDS = {
    r"tcgen05\.fence::after_thread_sync": ["triton_*_sm100", "gluon_*"],
    r"tcgen05\.fence::before_thread_sync": ["triton_*_sm100", "gluon_*"],
    r"not fenced after its init": [
        "triton_tma_*", "triton_attention_*", "triton_specialised_*", "triton_persistent_*",
    ],
    r"no fence\.proxy\.async": ["triton_pointers_*_sm100"],  # cp.async, then tcgen05.mma
    r"initialises mbarrier .* again, with no inval": ["triton_specialised_*_sm90"],
    r"overwrites the mbarrier .* with no mbarrier\.inval": ["triton_specialised_*_sm90"],
    r"parity \w+ is neither": ["triton_specialised_*_sm90"],
    # the address that tcgen05.alloc wrote, and an mbarrier of before: their place is loaded into
    r"race: .*cp\.async\.bulk\.tensor.*tcgen05\.alloc.*fence\.proxy\.async": [
        "triton_tma_*_sm100", "triton_attention_*_sm100", "triton_persistent_*_sm100",
        "triton_specialised_*_sm100",
    ],
    r"race: .*cp\.async\.bulk\.tensor.*mbarrier\.init.*fence\.proxy\.async": [
        "triton_specialised_*_sm90",
    ],
    # several warps write one value to one place
    r"race: `st\.shared.*missing: a barrier": [
        "triton_persistent_*", "triton_specialised_*", "triton_reduction_*",
    ],
    r"race: `@\S+ st\.global.*missing: a barrier": ["triton_specialised_*_sm90"],
}  # fmt: skip


def check_values(fixture: Fixture) -> None:
    for output, expected in fixture.expected.items():
        absolute, relative = fixture.tolerances[output]
        np.testing.assert_allclose(
            fixture.values(output), expected, atol=absolute, rtol=relative, err_msg=output
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_values(name: str, seed: int) -> None:
    fixture = load(name)
    emulate(fixture.ptx, fixture.launch, fixture.tensors, fixture.axes, seed=seed)
    check_values(fixture)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_hazards(name: str) -> None:
    fixture = load(name)
    report = emulate(fixture.ptx, fixture.launch, fixture.tensors, fixture.axes)
    check_values(fixture)
    known = [h for h, names in HAZARDS.items() if any(fnmatch(name, n) for n in names)]
    unknown = [h for h in report.hazards if not any(re.search(k, h) for k in known)]
    absent = [k for k in known if not any(re.search(k, h) for h in report.hazards)]
    assert (unknown, absent) == ([], [])


# A statement to leave out of a fixture, and what a schedule must then say (None: anything).
OMISSIONS = [
    ("triton_tma_128x128x64_fp16_sm100", r"tcgen05\.wait::ld\S*", "no wait::ld"),
    ("triton_attention_128x64_bf16_sm100", r"tcgen05\.wait::st\S*", None),
    ("triton_tma_128x128x64_fp16_sm100", r"@%p\d+ tcgen05\.dealloc[^;]*", "not deallocated"),
    ("triton_tma_128x128x64_fp16_sm100", r"@%p\d+ tcgen05\.commit[^;]*", "deadlock"),
    ("triton_tma_128x128x64_fp16_sm90", r"wgmma\.wait_group[^;]*", "no wait_group"),
    ("triton_tma_64x64x64_bf16_sm90", r"@%p\d+ mbarrier\.arrive\.expect_tx[^;]*", "deadlock"),
    ("triton_pointers_16x64x64_fp16_sm90", r"cp\.async\.wait_group[^;]*", "in flight"),
    ("gluon_pair_256x128x64_bf16_sm100", r"barrier\.cluster\S*", None),
    ("nvcc_matmul_mma_sm90", r"cp\.async\.wait_group[^;]*", "in flight"),
    ("nvcc_cluster_sum_sm100", r"barrier\.cluster\.\w+", None),
    ("nvcc_softmax_sm90", r"bar\.sync[^;]*", None),
]


@pytest.mark.parametrize(("name", "statement", "message"), OMISSIONS)
def test_omission_shows(name: str, statement: str, message: str | None) -> None:
    """Trust needs the reverse too: without a wait or a barrier the same kernel fails."""
    ptx, count = re.subn(rf"^\s*{statement}\s*;", "", load(name).ptx, flags=re.M)
    assert count
    with pytest.raises((Fault, AssertionError), match=message):
        for seed in range(4):
            fixture = load(name)
            emulate(ptx, fixture.launch, fixture.tensors, fixture.axes, seed=seed)
            check_values(fixture)
