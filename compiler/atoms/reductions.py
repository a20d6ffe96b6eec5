"""Atoms of both targets that count and weigh: shared atomics, what they add, zeros.

The elements of a row are float32 bits between LEAST and the bits of 1, which order as integers;
what lies below weighs nothing. A *key* is an element less LEAST, of KEY_BITS bits, a *weight*
rint(x 2^31), so that the weights of a row of probabilities add up in 32 bits. *Bins* hold a count
or a mass, a sum of weights, for each value of a digit of the key; where there are *copies* of a
bin, they are neighbours, each for some of the lanes: see `tile.bins`.
"""

from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import each, written

KEY_BITS = 28
LEAST = 0x2F800001  # the bits of the least float whose weight is not 0: just above 2^-32
WEIGHT_SCALE = "0f4F000000"  # 2^31
ALL_LANES = "0xFFFFFFFF"


def weigh(x: str, to: str, scale: str = WEIGHT_SCALE) -> list[str]:
    return [f"mul.f32 {to}, {x}, {scale};", f"cvt.rni.u32.f32 {to}, {to};"]


def skip_unless_any(predicates: list[str], label: str) -> list[str]:
    """Branch to a label where no lane has any of the predicates."""
    lines = [f"mov.pred %_some, {predicates[0]};"]
    lines += [f"or.pred %_some, %_some, {p};" for p in predicates[1:]]
    return [*lines, f"vote.sync.any.pred %_some, %_some, {ALL_LANES};", f"@!%_some bra {label};"]


instruction(
    "zero_shared(dst: smem*512 w, begun: bool=False, unread: str='dst')",
    written(
        "b32 z",
        "mov.b32 %_z, 0;",
        "mad.lo.u32 %ra, %lane, 16, {dst_reg};",
        "st.shared.v4.b32 [%ra], {{%_z, %_z, %_z, %_z}};",
    ),
    "9.7.9.11 st of zeros: 16 bytes a lane; begun: sums, to be read when something was added",
)
instruction(
    "weigh(dst: frag*n w, src: frag*n r, rounding: str='rni')",
    each(f"mul.f32 {{dst}}, {{src}}, {WEIGHT_SCALE};\ncvt.{{rounding}}.u32.f32 {{dst}}, {{dst}};"),
    "9.7.9.22 cvt: the weight of an element, or what is below it",
)
