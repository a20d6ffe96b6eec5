"""A store to a rank that the cluster has not was an IndexError of the validator, not a refusal."""

from __future__ import annotations

import pytest

from ptxflow.compiler.check import check
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, UOp, const, edit, walk
from tests.families.gemm import H200, HOPPER, build


def test_a_store_beyond_the_cluster_is_refused() -> None:
    tree, trips = build(H200, HOPPER["K over two CTAs, not specialised"])
    path, node = next(
        (p, n) for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == "st_async_v4"
    )
    beyond = UOp(Op.ATOM, (*node.src[:-1], const(2)), node.arg, node.site)
    with pytest.raises(HazardError, match="the cluster has no CTA 2"):
        check(edit(tree, path, (beyond,)), trips, H200)
