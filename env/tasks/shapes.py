"""Workloads drawn at random, all axes of them, on devices drawn at random: what a policy that is to
serve any shape is trained on, and judged by.

Ranges are stated here. What a family takes within them its problem says; constants of the 46
definitions are drawn, too, by half of the draws of an axis.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Family, Problem
from ptxflow.compiler.kernels import family as family_named
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.space import EmptySpace, Space
from ptxflow.env.tasks.arguments import UsageError, find_problem
from ptxflow.env.tasks.definition import Definition, DefinitionError, load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import ROWS, Row, registered

#: axes that follow from another, in definitions that have both
FOLLOWING: dict[str, tuple[str, Callable[[int], int]]] = {
    "len_indptr": ("batch_size", lambda n: n + 1),
    "len_cu_seqlens": ("num_seqs", lambda n: n + 1),
    "num_n_blocks": ("N", lambda n: -(-n // 128)),
    "num_k_blocks": ("K", lambda k: k // 128),
    "num_k_heads": ("num_q_heads", lambda n: n),
    "head_dim_with_scale": ("index_head_dim", lambda n: n + 4),
    "gemm1_out_size": ("intermediate_size", lambda n: 2 * n),
    "num_gemm1_out_blocks": ("intermediate_size", lambda n: n // 64),
    "num_intermediate_blocks": ("intermediate_size", lambda n: n // 128),
    "num_hidden_blocks": ("hidden_size", lambda n: n // 128),
}
#: least and most of constant axes, and what they are multiples of
RANGES: Mapping[str, tuple[int, int, int]] = {
    "N": (64, 32768, 8), "K": (256, 16384, 8), "hidden_size": (128, 16384, 8),
    "vocab_size": (8192, 262144, 8), "num_q_heads": (1, 32, 1), "num_v_heads": (1, 64, 1),
    "head_size": (64, 256, 64), "num_qo_heads": (4, 128, 1), "num_kv_heads": (1, 32, 1),
    "head_dim": (64, 256, 64), "page_size": (1, 128, 1), "topk": (64, 4096, 64),
    "num_index_heads": (8, 64, 8), "num_experts": (32, 512, 32), "num_local_experts": (4, 64, 4),
    "intermediate_size": (256, 8192, 128),
}  # fmt: skip
#: factors of a named device's figures, least and most
DEVICE_RANGES: Mapping[str, tuple[float, float]] = {
    "sms": (0.5, 1.3), "clock_ghz": (0.8, 1.15), "hbm_bytes_per_s": (0.6, 1.5),
    "l2_bytes": (0.5, 1.6), "smem_per_block": (0.5, 1.0),
}  # fmt: skip
TRIES = 60


def following(axes: Mapping[str, int]) -> dict[str, int]:
    """The axes, with those that follow from others as these say."""
    rules = {n: FOLLOWING[n] for n in axes if n in FOLLOWING and FOLLOWING[n][0] in axes}
    return {**axes, **{n: rule(axes[of]) for n, (of, rule) in rules.items()}}


def taken(definition: Definition, axes: Mapping[str, int]) -> tuple[Family, Problem] | None:
    """The family and the problem, where it takes these axes."""
    try:
        return find_problem(definition, axes)
    except (DefinitionError, UsageError):
        return None


def size(least: int, most: int, unit: int, rng: np.random.Generator) -> int:
    """All magnitudes are as likely; multiples of larger powers of two more than others."""
    drawn = float(np.exp(rng.uniform(np.log(least), np.log(most + 1))))
    coarse = unit << int(rng.integers(max(1, int(np.log2(max(drawn / unit, 1))) + 1)))
    return int(np.clip(round(drawn / coarse) * coarse, -(-least // unit) * unit, most))


def random_workload(
    row: Row, definition: Definition, rng: np.random.Generator
) -> tuple[Family, Problem]:
    """A problem of a definition with random axes, constant ones too; its sizes are within those of
    the row."""
    for _ in range(TRIES):
        constants = {
            name: size(*RANGES[name], rng)
            for name in definition.const_axes
            if name in RANGES and rng.random() < 0.5
        }
        whole = following({**definition.const_axes, **constants})
        resized = definition.resized(**{n: whole[n] for n in definition.const_axes})
        sizes = {n: size(max(1, min(v)), max(v), 1, rng) for n, v in row.trained.items()}
        if found := taken(resized, axes_of(resized, sizes)):
            return found
    raise UsageError(f"{definition.name}: no axes drawn within the ranges are taken")


def random_device(rng: np.random.Generator) -> Device:
    """One near a named device, whose architecture, efficiencies and name it has."""
    base = DEVICES[str(rng.choice(list(DEVICES)))]
    factor = {n: float(np.exp(rng.uniform(*np.log(r)))) for n, r in DEVICE_RANGES.items()}
    sms = round(base.sms * factor["sms"])
    return replace(
        base,
        sms=sms,
        clock_ghz=base.clock_ghz * factor["clock_ghz"],
        tflops_16bit=base.tflops_16bit * factor["clock_ghz"] * sms / base.sms,
        hbm_bytes_per_s=base.hbm_bytes_per_s * factor["hbm_bytes_per_s"],
        l2_bytes=int(base.l2_bytes * factor["l2_bytes"]),
        smem_per_block=int(base.smem_per_block * factor["smem_per_block"]) // 1024 * 1024,
    )


@dataclass(frozen=True)
class Stream:
    """Spaces of workloads of one family that are drawn at random; on `device`, or on any.

    Of devices drawn at random half are the named ones themselves, but for those `without`. Problems
    to `avoid` are never drawn. Of a `wide` space it is the part that rewards tell apart.
    """

    family: str
    device: Device | None = None
    without: Sequence[str] = ()
    avoid: Collection[Problem] = ()
    wide: bool = False

    def draw(self, n: int, rng: np.random.Generator) -> list[RelationSpace]:
        """n spaces, none of them empty."""
        rows = [(row, load(name)) for row in ROWS for name in row.definitions]
        rows = [(r, d) for r, d in rows if (f := registered(d)) and f.name == self.family]
        out: list[RelationSpace] = []
        while len(out) < n:
            row, definition = rows[rng.integers(len(rows))]
            family, problem = random_workload(row, definition, rng)
            if problem in self.avoid:
                continue
            own, device = family.wide if self.wide else family, self.device or self.any_device(rng)
            try:
                out.append(relate(own, problem, device).plain)
            except EmptySpace:
                continue
        return out

    def any_device(self, rng: np.random.Generator) -> Device:
        """One of those that are not left out, or near to one."""
        while True:
            device = random_device(rng)
            if device.name not in self.without:
                return DEVICES[device.name] if rng.random() < 0.5 else device


def listed_part(space: Space | RelationSpace | None) -> Space | None:
    """Of a wide space the strategies with listed choices, on which its policy is judged."""
    if not isinstance(space, RelationSpace):
        return space
    new = {name: (choice,) for name, choice in space.family.implied.items()}
    listed = {d.name: d.choices for d in family_named(space.family.name).decisions}
    return space.plain.given({**listed, **new}).listed()
