"""Our own workloads for attention, written by `python -m ptxflow.eval.bench.attention_workloads`.

Public rows of these definitions are short, or have more queries than keys. Ours are decoding at 1
to 128 sequences of 64 to 8192 tokens, and prefills of up to 16384, whole ones and chunks behind a
prefix. Remainders make lengths uneven (`sequences.pattern`). A quarter of a cache is not used.
"""

import json
import math
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ptxflow.command import Parser, require_checkout
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.sequences import split
from ptxflow.env.tasks.workload import FOLDER, OURS, Workload, workloads
from ptxflow.eval.bench.inputs import MLA_SCALE

OP_TYPES = ("gqa_paged", "gqa_ragged", "mla_paged")
INDICES = ("kv_indptr", "kv_indices", "kv_last_page_len", "qo_indptr")
SPARE_PAGES = 16  # of a cache, beside a quarter of those in use


@dataclass(frozen=True)
class Batch:
    """Sequences of so many tokens on average, of which `queries` are new, all in a prefill.

    The remainders are of pages in decoding, else of queries and of pages before them.
    """

    sequences: int
    tokens: int
    rest: int = 0
    queries: int = 1
    rest_before: int = 0


DECODING = (
    *(Batch(n, tokens) for n in (1, 4, 16, 64) for tokens in (64, 256, 1024, 4096, 8192)),
    Batch(128, 1024),
    *(Batch(n, tokens, rest) for n, tokens, rest in (
        (4, 1024, 1), (4, 4096, 2), (16, 256, 1), (16, 1024, 1), (16, 1024, 2), (16, 4096, 1),
        (16, 4096, 3), (64, 64, 1), (64, 256, 2), (64, 1024, 1), (64, 1024, 3), (64, 4096, 1),
        (64, 4096, 2), (128, 1024, 1),
    )),
)  # fmt: skip
PREFILL = (
    *(Batch(n, tokens, rest, tokens) for n, tokens, rest in (
        (1, 17, 0), (1, 128, 0), (1, 512, 0), (1, 1024, 0), (1, 4096, 0), (1, 8192, 0),
        (1, 16384, 0), (3, 333, 0), (4, 1024, 0), (4, 4096, 0), (7, 511, 0), (8, 512, 0),
        (16, 256, 0), (4, 1024, 1), (8, 1024, 2), (16, 512, 3), (32, 512, 1), (64, 128, 2),
    )),
    *(Batch(n, before + queries, rest, queries, rest_before)
      for n, queries, before, rest, rest_before in (
        (1, 512, 4096, 0, 0), (1, 2048, 8192, 0, 0), (4, 256, 2048, 0, 0), (8, 128, 1024, 1, 0),
        (16, 16, 1024, 0, 1), (16, 128, 2048, 3, 2),
    )),
)  # fmt: skip


def axes_of(definition: Definition, batch: Batch) -> dict[str, int]:
    """The variable axes at which the definition has these sequences."""
    count, page = batch.sequences, definition.const_axes.get("page_size", 1)
    before = count * ((batch.tokens - batch.queries) // page) + batch.rest_before
    total = count * batch.queries + batch.rest
    if "total_q" in definition.var_axes:
        pages = before + int((-(-split(total, count, "queries") // page)).sum())
    else:
        pages = count * batch.tokens // page + batch.rest
    values = {
        "batch_size": count,
        "len_indptr": count + 1,
        "total_q": total,
        "total_kv": total + before,
        "num_kv_indices": pages,
        "num_pages": pages + pages // 4 + SPARE_PAGES,
    }
    return {axis: values[axis] for axis in definition.var_axes}


def rows(definition: Definition) -> Iterator[Workload]:
    """Our workloads of one of the attention definitions."""
    dim = definition.const_axes.get("head_dim")
    scale = MLA_SCALE if dim is None else 1 / math.sqrt(dim)
    inputs: dict[str, dict[str, Any]] = {
        name: {"type": "generated" if name in INDICES else "random"} for name in definition.inputs
    }
    inputs["sm_scale"] = {"type": "scalar", "value": scale}
    for batch in PREFILL if "total_q" in definition.var_axes else DECODING:
        axes = axes_of(definition, batch)
        name = json.dumps([definition.name, axes], sort_keys=True)
        row_id = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
        yield Workload(definition.name, row_id, axes, inputs, OURS)


def main(argv: Sequence[str] | None = None) -> int:
    """Write our rows after the public ones of every attention definition."""
    prog = "python -m ptxflow.eval.bench.attention_workloads"
    Parser(prog=prog, description=__doc__).parse_args(argv)
    require_checkout("attention_workloads")
    for name in names():
        definition = load(name)
        if definition.op_type not in OP_TYPES:
            continue
        kept = [row for row in workloads(name) if row.public]
        lines = [json.dumps(row.to_json()) + "\n" for row in (*kept, *rows(definition))]
        path = FOLDER / definition.op_type / f"{name}.jsonl"
        write_whole(path, "".join(lines))
        print(f"{name}: {len(kept)} public rows, {len(lines) - len(kept)} of ours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
