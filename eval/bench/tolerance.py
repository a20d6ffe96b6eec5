"""How far a right kernel may be from the reference, per op type and output, and why.

An element passes when |actual - expected| <= atol + rtol * |expected|. Absolute parts hold for the
data of `inputs.make_inputs`, whose scale is known. Where the reference is NaN the definition leaves
the value open, and it is not compared. Infinities must agree.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from ptxflow.env.tasks.definition import Definition, DefinitionError

ELEMENTWISE, SUPPORT, TOPK = "elementwise", "support", "topk"
ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}


class Tolerance(NamedTuple):
    """`rtol` and `atol` are in the output's own units, of scores where `kind` is topk.

    elementwise  every element is within the tolerance of the reference
    support      a drawn index has a probability above 0
    topk         the scores of the chosen slots are the best there are
    """

    rtol: float
    atol: float
    reason: str
    kind: str = ELEMENTWISE


def tolerance(definition: Definition, output: str | None = None) -> Tolerance:
    """The tolerance of one output, the first where none is named.

    DefinitionError for an output that there is not, and for an op type without a rule.
    """
    name = output if output is not None else next(iter(definition.outputs))
    if name not in definition.outputs:
        raise DefinitionError(
            f"{definition.name}: no output {name!r}; there are {', '.join(definition.outputs)}"
        )
    if definition.op_type not in _RULES:
        raise DefinitionError(
            f"{definition.name}: no tolerance for op_type {definition.op_type!r}; "
            f"there are {', '.join(sorted(_RULES))}"
        )
    rule = _RULES[definition.op_type]
    return rule if isinstance(rule, Tolerance) else rule(definition, name)


def _gemm(definition: Definition, output: str) -> Tolerance:
    dtype = definition.outputs[output].dtype
    depth = (definition.inputs["A"].shape or ("K",))[-1]
    if dtype not in ULP or depth not in definition.const_axes:
        raise DefinitionError(
            f"{definition.name}: the tolerance of a matrix product needs a constant K "
            f"and an output of {', '.join(ULP)}, not {dtype} with {depth} variable"
        )
    k = definition.const_axes[depth]
    # Partial sums of K products of standard normals stay under 6 sqrt(K); a tensor core adds 8
    # or more products at a time and truncates, so K/8 steps lose at most an ulp of the sum each.
    atol = k / 8 * ULP["float32"] * 6 * math.sqrt(k)
    return Tolerance(
        ULP[dtype],
        atol,
        "both sides round once to the output type (half an ulp each) after K/8 truncated float32 "
        "additions of partial sums below 6 sqrt(K); a missing product is about 1, a K step 4 to 8",
    )


def _gemm_epilogue(definition: Definition, output: str) -> Tolerance:
    rtol, atol, *_ = _gemm(definition, output)
    return Tolerance(
        rtol,
        6 * atol / math.sqrt(definition.const_axes["K"]),
        "a matrix product's, of sums that are standard normal; a gate multiplies their error by up "
        "to 6; a missing product is about 1/sqrt(K), a K step 4/sqrt(K) to 8/sqrt(K)",
    )


def _gemm_fp8(definition: Definition, output: str) -> Tolerance:
    blocks = definition.const_axes["K"] / 128
    return Tolerance(
        ULP["bfloat16"],
        2.0**-10 * math.sqrt(blocks),
        "sums are standard normal, those of 128 of K smaller by sqrt(K/128); float8 tensor cores "
        "of sm_90a keep 13 bits below the largest addend of 32, four times a block: 2^-11 of what "
        "a block adds, which is up to two deviations; a missing K step of 32 is sqrt(32/K), nine "
        "times this and more",
    )


def _attention(definition: Definition, output: str) -> Tolerance:
    if output == "lse":
        return Tolerance(
            2.0**-20,
            2.0**-14,
            "float32 scores of exact products, hardware exp2 (2^-22); a token missing of L = 4096 "
            "moves lse by about 1/(L ln 2) = 3.5e-4, five times this",
        )
    return Tolerance(
        2.0**-7,
        2.0**-7,
        "probabilities may be rounded to bfloat16 (half an ulp, up to 2^-8 of each) before they "
        "meet values below 4 in size; the largest is 1 and exact, so that the weighted sizes of "
        "the others add to at most 2; then one rounding",
    )


def _dsa(definition: Definition, output: str) -> Tolerance:
    if output == "topk_indices":
        return Tolerance(
            2.0**-14,
            2.0**-3,
            "slots are distinct and reachable, no float32 score is below the reference's last, and "
            "none above it is left out; float8 tensor cores of sm_90a keep 13 bits below the "
            "largest addend, which moves a score of 64 heads, about 50 in size, by 0.008 (0.065 at "
            "most of 10^5): at the end of the choice two may change places that are less than "
            "twice that apart",
            TOPK,
        )
    return _attention(definition, output)


def _gdn(definition: Definition, output: str) -> Tolerance:
    prefill = "cu_seqlens" in definition.inputs
    size = definition.const_axes.get("head_size", 128)
    scale = 1 / math.sqrt(size)  # of the state's entries, values being about 1 and keys unit long
    if output == "new_state":
        if prefill:
            return Tolerance(
                2.0**-6,
                2.0**-5 * scale,
                "chunked forms multiply in bfloat16 (2^-9 a factor, some tens of terms at random)",
            )
        return Tolerance(
            2.0**-16,
            2.0**-16 * scale,
            "one float32 step, two sums over the head size; hardware exp (2^-22)",
        )
    return Tolerance(
        2.0**-6 if prefill else ULP["bfloat16"],
        (2.0**-5 if prefill else 2.0**-14) * scale * scale,
        "the state's error through one unit-long query and the scale, then one rounding",
    )


_RULES: dict[str, Tolerance | Callable[[Definition, str], Tolerance]] = {
    "gemm": _gemm,
    "gemm_epilogue": _gemm_epilogue,
    "gemm_fp8": _gemm_fp8,
    "rmsnorm": Tolerance(
        ULP["bfloat16"],
        2.0**-20,
        "float32 throughout: the two sides differ by an ulp where a rounding falls the other way",
    ),
    "gqa_paged": _attention,
    "gqa_ragged": _attention,
    "mla_paged": _attention,
    "dsa_paged": _dsa,
    "gdn": _gdn,
    "moe": Tolerance(
        2.0**-5,
        0.06,
        "float8 kernels round the hidden activations again: half an ulp is 2^-4, a uniform error "
        "of 0.036 of each term, so of the sum; an expert adds about 0.2 to a token, its error is "
        "0.007, and 0.06 is five deviations of three experts",
    ),
    "sampling": Tolerance(
        0.0,
        0.0,
        "a token is right when references.sampling.filtered gives it a probability above zero; of "
        "our own kernels it must be the very one that integers give for the generator's state; "
        "frequencies are a statistical test",
        SUPPORT,
    ),
}
