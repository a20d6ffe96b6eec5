"""Bugs that were found, each told by what went wrong."""

from dataclasses import replace

import numpy as np
import pytest

from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import HazardError, SpecError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import Op, Statement, const, edit, walk
from ptxflow.compiler.lower import layout
from ptxflow.env.space import enumerate_space
from tests.families.gemm import GEMM, HOPPER, build, problem, swapped
from tests.given import B200, H200


def test_a_store_beyond_the_cluster_is_refused() -> None:
    tree, trips = build(H200, HOPPER["K over two CTAs, not specialised"])
    path, node = next(
        (p, n) for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == "st_async_v4"
    )
    beyond = Statement(Op.ATOM, (*node.src[:-1], const(2)), node.arg, node.site)
    with pytest.raises(HazardError, match="the cluster has no CTA 2"):
        check(edit(tree, path, (beyond,)), trips, H200)


NARROW = swapped(tile_n=8, tile_k=32, num_stages=3, consumers=1, split_k=3)
SHAPES = ((8, 4096, 4096), (100, 512, 1024), (4096, 4096, 4096))


def asked_and_taken(s: Strategy, shape: tuple[int, int, int], dev: Device) -> tuple[int, int]:
    """Bytes that the launch asks for, and where the kernel's storage ends."""
    p = problem(*shape)
    return GEMM.launch(p, s, dev).smem_bytes, layout(GEMM.build(p, s, dev).arg).smem_bytes


def test_the_kernel_that_faulted() -> None:
    asked, taken = asked_and_taken(NARROW, SHAPES[0], H200)
    assert asked == taken


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_launch_asks_for_less_than_its_kernel_takes(
    dev: Device, shape: tuple[int, int, int]
) -> None:
    space = enumerate_space(GEMM, problem(*shape), dev)
    for code in space.sample_uniform(40, np.random.default_rng(0)):
        s = space.strategy(int(code))
        asked, taken = asked_and_taken(s, shape, dev)
        assert taken <= asked <= dev.smem_per_block, s


def test_a_launch_with_too_little_is_refused() -> None:
    p = problem(*SHAPES[0])
    kernel, launch = GEMM.build(p, NARROW, H200), GEMM.launch(p, NARROW, H200)
    check_launch(kernel, launch)
    short = replace(launch, smem_bytes=launch.smem_bytes - 512)
    with pytest.raises(SpecError, match=r"its storage ends at \d+; fix: count"):
        check_launch(kernel, short)
