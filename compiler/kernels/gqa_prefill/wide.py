"""The wide space of a prefill: several blocks on an SM, finer tiles, keys in parts."""

import numpy as np

from ptxflow.compiler.family import Decision, Wide, rule
from ptxflow.compiler.kernels.gqa_prefill import decisions as listed

BESIDE = 30  # registers that an instruction needs beside its results
MOST = 1 << 31  # bytes of what parts come to
TILES = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208)

DECISIONS = (
    Decision("tile_kv", TILES, "keys of a step"),
    Decision("resident", (1, 2, 3), "blocks that an SM holds at a time"),
    Decision("producer_warps", (4, 1), "1: registers are not split (wgmma)"),
    Decision(
        "query_box",
        (listed.TOKEN, listed.TILE),
        "whose queries in heads that share a tile TMA brings",
    ),
    Decision("parts", (1, 2, 3, 4, 6, 8, 12, 16), "of a tile's keys at most, each a block's"),
    Decision("least", (2, 4, 8, 16), "tiles of keys of a part, at least"),
)

RULES = (
    rule(
        listed.OUTGROWN,
        "consumers tile_kv overlap resident producer_warps parts",
        lambda f, p, d: listed.held(f, p, d) <= listed.register_limit(f, d),
    ),
    rule(
        listed.SHARED,
        "consumers tile_kv stages resident",
        lambda f, p, d: listed.fitting(f, p, d) >= f.resident,
    ),
    rule(
        listed.COLUMNS,
        "consumers tile_kv overlap resident",
        lambda f, p, d: (
            (not d.has_tmem) | (listed.tmem_columns(f, p) * f.resident <= d.tmem_columns)
        ),
    ),
    rule(
        "a block begins with registers for the results of an instruction",
        "consumers tile_kv resident producer_warps",
        lambda f, p, d: (
            np.maximum(f.tile_kv, p["head_dim"]) // 2 + BESIDE <= listed.begun_with(f, d)
        ),
    ),
    rule(
        "one warp brings whole boxes (wgmma)",
        "tile_kv producer_warps",
        lambda f, p, d: (f.producer_warps == 4) | ((not d.has_tmem) & listed.boxes(p, f.tile_kv)),
    ),
    rule(
        "a token in one head is no box of its own",
        "share query_box",
        lambda f, p, d: (f.share > 1) | (f.query_box == listed.TOKEN),
    ),
    rule(
        "tiles of a part are counted where keys are in parts",
        "parts least",
        lambda f, p, d: (f.parts > 1) | (f.least == 2),
    ),
    rule(
        f"what parts come to takes {MOST >> 30} GiB at most",
        "parts",
        lambda f, p, d: (f.parts == 1) | (2 * f.parts * listed.output_bytes(p) <= MOST),
    ),
)

WIDE = Wide(DECISIONS, RULES)
