"""The work of a gdn_prefill problem, and what the model says of few sequences."""

from __future__ import annotations

from ptxflow.env.cost import model_tflops
from ptxflow.env.tasks.definition import load
from tests.families.gdn_prefill import H200, NAME, PREFILL, problem
from tests.families.row import space


def test_work_is_counted() -> None:
    given = load(NAME)
    axes = {"total_seq_len": 8192, "num_seqs": 20, "len_cu_seqlens": 21}
    p = PREFILL.problem(given.to_json(), given.bind(axes))
    assert p.flops == 6 * 128 * 128 * 32 * 8192 and p.dtype == "bfloat16"
    tokens = 2 * 8192 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert p.bytes == tokens + 8 * 20 * 32 * 128 * 128 + 8 * 21 + 8 * 32


def test_one_long_sequence_asks_for_more_ctas() -> None:
    best = []
    for sequences in (1, 32):
        found = space(problem(8192, sequences, 128, 16, 32))
        tflops = model_tflops(PREFILL, found.fields(), found.problem, H200)
        best.append(found.strategy(int(found.codes[tflops.argmax()])))
    assert best[0].rows < best[1].rows
