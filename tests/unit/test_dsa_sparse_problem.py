"""The work of a sparse attention problem."""

from __future__ import annotations

import pytest

from ptxflow.env.tasks.definition import load
from tests.families.dsa_sparse import SPARSE


@pytest.mark.parametrize("page", [1, 64])
def test_work_is_counted(page: int) -> None:
    """Of few tokens every entry is a row of its own; more than there are rows no list names."""
    given = load(f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{page}").to_json()
    small = 2 * 3 * 16 * (2 * 512 + 64) + 4 * (3 * 16 + 3 * 256)
    for pages, rows in ((8462, 768), (3, 3 * page)):
        p = SPARSE.problem(given, {"num_tokens": 3, "num_pages": pages})
        assert p.flops == 2 * 16 * (2 * 512 + 64) * 3 * 256 and p.dtype == "bfloat16"
        assert p.bytes == small + 2 * 576 * rows
