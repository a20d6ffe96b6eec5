"""An indexer problem is what the family can build; its space what hardware can run."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from ptxflow.compiler.kernels.dsa_indexer.decisions import (
    digits,
    entries,
    select_registers,
    select_smem,
)
from ptxflow.compiler.kernels.dsa_indexer.select import Select
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load
from tests.dsa_indexer_cases import B200, H200, definition, problem, space

NAME = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
AXES = {"batch_size": 3, "max_num_pages": 10, "num_pages": 20}


def test_the_recorded_definition_has_a_family() -> None:
    given = load(NAME).to_json()
    assert family_for(given["op_type"], given["inputs"]) is DSA_INDEXER
    p = DSA_INDEXER.problem(given, AXES)
    keys = 20 * 64  # fewer pages than the tables have room for
    assert p.flops == 2 * 64 * 128 * keys and p.bound(H200) == "memory"
    assert p.bytes == keys * 132 + 3 * 64 * 132 + 4 * (3 + 20 + 3 * 256)
    made = DSA_INDEXER.problem(definition(), AXES)
    assert (made.axes, made.bytes) == (p.axes, p.bytes)


def changed(path: str, value: Any) -> dict[str, Any]:
    out = copy.deepcopy(definition())
    *parents, last = path.split(".")
    node = out
    for key in parents:
        node = node[key]
    node[last] = value
    return out


@pytest.mark.parametrize(
    ("given", "axes", "message"),
    [
        (definition(), {"batch_size": 0}, "positive integer, not 0"),
        (definition(heads=24), {}, "24 heads must be a multiple of 16"),
        (definition(heads=80), {}, "80 heads"),
        (definition(dim=96), {}, "index_head_dim = 96 must be one of"),
        (definition(page=16), {}, "page_size = 16 of"),
        (definition(topk=100), {}, "topk = 100 must be a multiple of 32"),
        (definition(topk=2080), {}, "topk = 2080 must be a multiple of 32, 2048 at most"),
        (definition(), {"max_num_pages": 2**15}, "more than 1048576 tokens"),
        (definition(), {"batch_size": 2**20, "max_num_pages": 64}, "more than 4294967295 scores"),
        (definition(), {"num_pages": 2**23}, "the cache has more than"),
        (changed("axes.head_dim_with_scale.value", 136), {}, "one key of 128 \\+ 4 bytes"),
        (changed("inputs.seq_lens.dtype", "int64"), {}, "an indexer has the inputs"),
        (changed("outputs", {}), {}, "an indexer has the outputs"),
    ],
)
def test_what_cannot_be_built_is_named(
    given: dict[str, Any], axes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DSA_INDEXER.problem(given, AXES | axes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("topk", [256, 2048])
def test_spaces_hold_what_runs(dev, topk: int) -> None:  # type: ignore[no-untyped-def]
    for pages in (64, 1024):
        p = problem(64, pages, topk=topk)
        found = space(p, dev)
        f = found.fields()
        assert len(found) >= 1000
        assert (entries(f, p) >= p["topk"]).all() and (f.bits * digits(f.bits) >= 52).all()
        assert (f.bits * digits(f.bits) <= 64).all()  # of an entry, which has 64 bits
    for code in found.sample_uniform(20, np.random.default_rng(0)):
        s = found.strategy(int(code))
        assert Select(p, s, dev).smem_bytes <= select_smem(s.fields(), p) <= dev.smem_per_block


@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize(("dim", "page", "topk"), [(64, 32, 32), (128, 128, 1024), (128, 64, 2048)])
def test_every_size_has_strategies(heads: int, dim: int, page: int, topk: int) -> None:
    for dev in (H200, B200):
        assert len(space(problem(1, 8, heads=heads, dim=dim, page=page, topk=topk), dev))


def test_the_model_tells_strategies_apart() -> None:
    """Modelled speeds are finite, below the roofline of float8, and not all alike."""
    for batch, pages in ((1, 64), (64, 2048)):
        for dev in (H200, B200):
            p = problem(batch, pages)
            found = space(p, dev)
            speed = model_tflops(DSA_INDEXER, found.fields(), p, dev)
            assert np.isfinite(speed).all() and (speed > 0).all()
            assert speed.max() <= p.roofline_tflops(dev) and speed.max() > 1.5 * speed.min()
            assert all(np.isfinite(v) for v in describe_problem(p, dev).values())


def test_long_rows_want_clusters() -> None:
    """One sequence alone: several CTAs choose sooner than one."""
    p = problem(1, 2048)
    found = space(p)
    f = found.fields()
    speed = model_tflops(DSA_INDEXER, f, p, H200)
    assert f.ctas[speed.argmax()] > 1 and speed[f.ctas == 1].max() < speed.max()


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_the_second_kernel_fits_its_registers(dev) -> None:  # type: ignore[no-untyped-def]
    for topk in (256, 2048):
        p = problem(64, 2048, topk=topk)
        f = space(p, dev).fields()
        assert (select_registers(f, p) * f.threads <= dev.registers_per_sm).all()
        assert select_registers(f, p).max() <= dev.registers_per_thread
