"""The workloads that a policy is trained on, and those that are held out: presets by definition.

A `Row` names definitions and the values of their variable axes. Rows whose family is not
registered are passed over. A definition that no row names takes the row of its family.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ptxflow.compiler.family import Family, Problem
from ptxflow.compiler.kernels import family_for
from ptxflow.env.tasks.arguments import find_family, find_problem, product
from ptxflow.env.tasks.definition import Definition, DefinitionError, load, names, own_names
from ptxflow.env.tasks.sequences import axes_of

Values = Mapping[str, tuple[int, ...]]
KINDS = ("trained", "held_out", "unseen")


@dataclass(frozen=True)
class Row:
    """Definitions, values of their variable axes, and a typical workload.

    Instead of axes that depend on each other, values may be sizes: see `sequences.axes_of`.
    unseen: definitions with other constants, at the held-out values; they are never trained.
    """

    definitions: tuple[str, ...]
    trained: Values
    held_out: Values
    typical: Mapping[str, int]
    unseen: tuple[tuple[str, Mapping[str, int]], ...] = ()


@dataclass(frozen=True)
class Preset:
    """Defaults of a run; `train` are fields of `TrainConfig`."""

    rows: tuple[Row, ...]
    minutes: float
    measurements: int  # of exact distances during a run
    shapes: int = 0  # workloads of a family at a time, drawn at random instead of the rows' trained
    train: Mapping[str, Any] = field(default_factory=dict)


def octaves(last: int, parts: int, but: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Whole numbers from 1 to `last` in equal steps, `parts` of them an octave, without some."""
    fractions = ((1 << e) * (parts + i) / parts for e in range(last.bit_length()) for i in
                 range(parts))  # fmt: skip
    return tuple(int(v) for v in fractions if v <= last and v == int(v) and v not in but)


GEMM = Row(
    (
        "gemm_n128_k2048", "gemm_n256_k7168", "gemm_n2048_k4096", "gemm_n4096_k4096",
        "gemm_n4096_k14336", "gemm_n5120_k2048", "gemm_n6144_k4096", "gemm_n28672_k4096",
    ),
    trained={"M": (104, *octaves(8192, parts=4, but=(112, 3072)))},
    held_out={"M": (17, 112, 1000, 3072)},
    typical={"M": 1024},
    unseen=(("gemm_n4096_k4096", {"N": 3072}), ("gemm_n5120_k2048", {"K": 3072})),
)  # fmt: skip
RMSNORM = Row(
    (
        "rmsnorm_h512", "rmsnorm_h1536", "rmsnorm_h2048", "rmsnorm_h4096", "rmsnorm_h7168",
        "fused_add_rmsnorm_h2048", "fused_add_rmsnorm_h4096", "fused_add_rmsnorm_h7168",
    ),
    trained={"batch_size": octaves(16384, parts=4, but=(7,))},
    held_out={"batch_size": (7, 100, 700, 3000)},
    typical={"batch_size": 1024},
    unseen=(
        ("rmsnorm_h4096", {"hidden_size": 5120}),
        ("fused_add_rmsnorm_h4096", {"hidden_size": 3072}),
    ),
)  # fmt: skip
HEADS = Row(  # norms of attention heads: short rows, many of them
    ("rmsnorm_h128",),
    trained={"batch_size": octaves(524288, parts=2)},
    held_out={"batch_size": (7, 100, 700, 3000, 400000)},
    typical={"batch_size": 16384},
)
SAMPLING = Row(
    tuple(
        f"{kind}_sampling_from_probs_v{size}"
        for kind in ("top_k", "top_p", "top_k_top_p")
        for size in (128256, 129280, 151936)
    ),
    trained={"batch_size": octaves(512, parts=4, but=(7, 20))},
    held_out={"batch_size": (7, 20, 100)},
    typical={"batch_size": 64},
    unseen=(("top_p_sampling_from_probs_v128256", {"vocab_size": 32000}),),
)
GDN_DECODE = Row(
    ("gdn_decode_qk16_v32_d128_k_last",),
    trained={"batch_size": octaves(512, parts=8, but=(7, 20))},
    held_out={"batch_size": (7, 20, 100, 300)},
    typical={"batch_size": 64},
)
DECODE = Row(
    (
        "gqa_paged_decode_h32_kv4_d128_ps1", "gqa_paged_decode_h32_kv4_d128_ps64",
        "gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv8_d128_ps64",
        "mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged_decode_h16_ckv512_kpe64_ps64",
    ),
    trained={
        "sequences": (1, 2, 3, 5, 8, 12, 16, 28, 32, 64, 80, 128, 256),
        "length": (32, 64, 90, 128, 256, 400, 512, 900, 1024, 1536, 2500, 4096, 8192, 16384),
    },
    held_out={"sequences": (6, 20, 100), "length": (200, 3000)},
    typical={"sequences": 16, "length": 1024},
)  # fmt: skip
PREFILL = Row(
    (
        "gqa_paged_prefill_causal_h32_kv4_d128_ps1", "gqa_paged_prefill_causal_h32_kv4_d128_ps64",
        "gqa_paged_prefill_causal_h32_kv8_d128_ps1", "gqa_paged_prefill_causal_h32_kv8_d128_ps64",
        "gqa_ragged_prefill_causal_h32_kv4_d128", "gqa_ragged_prefill_causal_h32_kv8_d128",
        "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1",
        "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
    ),
    trained={
        "sequences": (1, 2, 4, 7, 8, 16, 32),
        "queries": (
            16, 24, 40, 64, 96, 128, 200, 256, 300, 512, 900, 1024, 1500, 2048, 2500, 4096, 6000,
            8192, 16384,
        ),
        "prefix": (0, 300, 1024),
    },
    held_out={"sequences": (3,), "queries": (100, 700, 3000), "prefix": (512, 2048)},
    typical={"sequences": 4, "queries": 1024, "prefix": 0},
)  # fmt: skip
GDN_PREFILL = Row(
    ("gdn_prefill_qk16_v32_d128_k_last",),
    trained={
        "sequences": (1, 2, 3, 4, 5, 7, 8, 10, 12, 14, 16, 24, 28, 32),
        "length": (16, 50, 64, 128, 256, 400, 512, 900, 1024, 1500, 2048, 4096, 8192, 16384),
    },
    held_out={"sequences": (6, 20), "length": (200, 3000)},
    typical={"sequences": 4, "length": 1024},
)
LISTS, LISTS_OF_PAGES = (  # caches as long as those of public rows, shorter ones, and between
    Row(
        (f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{page}",),
        trained={
            "num_tokens": octaves(4096, parts=4, but=(7, 20)),
            "num_pages": tuple(-(-tokens // page) for tokens in (541568, 131072)),
        },
        held_out={"num_tokens": (7, 20, 100, 700), "num_pages": (262144 // page,)},
        typical={"num_tokens": 64, "num_pages": 541568 // page},
    )
    for page in (1, 64)
)
INDEXER = Row(
    ("dsa_topk_indexer_fp8_h64_d128_topk256_ps64",),
    trained={
        "sequences": (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128),
        "length": (
            64, 192, 256, 400, 512, 900, 1024, 1500, 2048, 2500, 4096, 6000, 8192, 12000, 16384,
            25000, 32768, 50000, 65536, 100000, 131072,
        ),
    },
    held_out={"sequences": (6, 20), "length": (700, 3000, 20000)},
    typical={"sequences": 64, "length": 8192},
)  # fmt: skip
EXPERTS = Row(
    ("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",),
    trained={"seq_len": octaves(16384, parts=8, but=(7, 80))},
    held_out={"seq_len": (7, 57, 80, 901, 11948, 14107)},
    typical={"seq_len": 64},
)
ROWS = (
    GEMM, RMSNORM, HEADS, SAMPLING, GDN_DECODE, DECODE, PREFILL, GDN_PREFILL, LISTS, LISTS_OF_PAGES,
    INDEXER, EXPERTS,
)  # fmt: skip
#: of definitions that no committed policy was trained on
OWN_ROWS = (Row(own_names(), trained=GEMM.trained, held_out=GEMM.held_out, typical=GEMM.typical),)
_DEMO = Row(
    ("gemm_n2048_k4096", "gemm_n4096_k4096", "gemm_n6144_k4096"), trained={"M": (64, 1024)},
    held_out={"M": (1000,)}, typical=GEMM.typical,
)  # fmt: skip
PRESETS = {
    "full": Preset(ROWS, minutes=24.0, measurements=16),
    "shapes": Preset(ROWS, minutes=24.0, measurements=4, shapes=256,
        train={"stages": 1, "batch": 512, "workloads": 16, "knowing": "model"}),
    "demo": Preset((_DEMO,), minutes=1.2, measurements=8, train={"stages": 2, "batch": 256}),
}  # fmt: skip
# Fields of `TrainConfig` where training runs on a GPU: batches that fill it, and a deeper network,
# which costs little there
ON_GPU: Mapping[str, Any] = {"batch": 16384, "workloads": 64, "each": 64, "layers": 3}


def registered(definition: Definition) -> Family | None:
    """The family that builds kernels for a definition, if there is one."""
    try:
        return family_for(definition.op_type, definition.inputs)
    except KeyError:
        return None


def rows_of(family: Family | None, rows: Sequence[Row]) -> list[tuple[Row, Definition]]:
    """The rows that name a definition of the family, and the first such definition of each."""
    of_each = ([load(name) for name in row.definitions] for row in rows)
    own = [[d for d in found if registered(d) is family] for found in of_each]
    return [(row, found[0]) for row, found in zip(rows, own, strict=True) if found]


def row_of(definition: Definition, rows: Sequence[Row] = (*ROWS, *OWN_ROWS)) -> Row | None:
    """The row that names the definition, else the first of its family and variable axes."""
    for row in rows:
        if definition.name in row.definitions:
            return row
    for row, first in rows_of(registered(definition), rows):
        if set(first.var_axes) == set(definition.var_axes):
            return row
    return None


def typical_axes(definition: Definition) -> dict[str, int] | None:
    """Values of the variable axes that fit each other: its row's typical workload.

    Where no row has the same variable axes: that of its family's first row, and what is constant
    there. None where a family builds no kernel for these.
    """
    family = registered(definition)
    rows = rows_of(family, (*ROWS, *OWN_ROWS)) if family else []
    if row := row_of(definition):
        rows.insert(0, (row, load(row.definitions[0])))
    for row, first in rows:
        known = {**first.const_axes, **axes_of(first, row.typical)}
        known |= axes_of(definition, row.typical)
        axes = {name: known[name] for name in definition.var_axes if name in known}
        try:
            find_problem(definition, axes)
            return axes
        except ValueError:
            continue
    return None


def chosen(text: str | None, preset: Preset) -> tuple[str, ...]:
    """The definitions of a run: names, JSON files and families, comma-separated; by default every
    one of the preset whose family is registered. DefinitionError for what is unknown."""
    families = _families(PRESETS["full"])
    if text is None or text == "all":
        return tuple(_families(preset))
    out: list[str] = []
    for item in filter(None, map(str.strip, text.split(","))):
        if item in families.values():
            out += [name for name, family in families.items() if family == item]
        elif item in (*names(), *own_names()) or item.endswith(".json"):
            load(item)
            out.append(item)
        else:
            offered = [*dict.fromkeys(families.values()), *names()]
            near = difflib.get_close_matches(item, offered, n=4, cutoff=0.4)
            hint = f"near: {', '.join(near)}" if near else f"families: {', '.join(offered[:4])}"
            raise DefinitionError(f"unknown definition or family {item!r}; {hint}")
    if not out:
        raise DefinitionError("no definition is given")
    return tuple(dict.fromkeys(out))


def _families(preset: Preset) -> dict[str, str]:
    """The preset's definitions whose family is registered, and its name."""
    known = [name for row in preset.rows for name in row.definitions]
    return {name: family.name for name in known if (family := registered(load(name)))}


@dataclass(frozen=True)
class Member:
    """One workload of a run: a problem, the values of its variable axes, and its kind.

    `label` names the definition, and the constants that are not its own.
    """

    label: str
    definition: Definition
    family: Family
    axes: Mapping[str, int]
    problem: Problem
    kind: str


def members(chosen: Sequence[str], preset: Preset, wide: bool = False) -> list[Member]:
    """The workloads of the definitions, by kind; BadInput, one line, where there are none. Of wide
    spaces those of families that have one."""
    out: list[Member] = []
    for name in chosen:
        definition = load(name)
        find_family(definition)
        row = row_of(definition, preset.rows) or row_of(definition)
        if row is None:
            axes = ", ".join(definition.var_axes)
            raise DefinitionError(
                f"{definition.name}: no preset says which values of {axes} to train"
            )
        for kind, values in (("trained", row.trained), ("held_out", row.held_out)):
            out += [_member(definition.name, definition, sizes, kind) for sizes in product(values)]
        for other, constants in row.unseen:
            if other == definition.name:
                label = " ".join([other, *(f"{a}={v}" for a, v in constants.items())])
                resized = definition.resized(**constants)
                out += [_member(label, resized, v, "unseen") for v in product(row.held_out)]
    if wide:
        out = [replace(m, family=m.family.wide) for m in out if m.family.more.decisions]
        if not out:
            raise DefinitionError("--space wide: none of these families has a wide space")
    return sorted(out, key=lambda m: KINDS.index(m.kind))


def _member(label: str, definition: Definition, sizes: Mapping[str, int], kind: str) -> Member:
    axes = axes_of(definition, sizes)
    family, problem = find_problem(definition, axes)
    return Member(label, definition, family, axes, problem, kind)
