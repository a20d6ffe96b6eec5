"""What rounding between the products of experts costs: `python -m ptxflow.eval.study.moe_error`.

A model in torch of what moe kernels compute, with their roundings, beside the reference, on the
inputs with which kernels are checked. Errors are shares of the tolerance: above 1 a kernel would be
refused. What Hopper's float8 products drop below the largest addend is not modelled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from tqdm import tqdm

from ptxflow.compiler.kernels.moe.shape import BFLOAT16, FLOAT32
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references.moe import dequantise, route
from ptxflow.eval.bench.tolerance import tolerance

DEFINITION = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
COLUMNS = (0, 32, 64, 128)  # that share a scale; 0: no rounding
LARGEST = 448.0  # of e4m3


def rounded(h: torch.Tensor, columns: int) -> torch.Tensor:
    """h [rows, inner] through float8, with a scale for so many columns of a row."""
    if not columns:
        return h
    blocks = h.reshape(len(h), -1, columns)
    top = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    values = (blocks * (LARGEST / top)).to(torch.float8_e4m3fn).float()
    return (values * (top / LARGEST)).reshape(h.shape)


def outputs(
    inputs: dict[str, torch.Tensor], forms: Sequence[tuple[int, str]]
) -> dict[tuple[int, str], torch.Tensor]:
    """Of each form, a number of columns and a type of an expert's outputs: output [T, hidden]."""
    chosen, share = route(inputs["routing_logits"], inputs["routing_bias"])
    tokens = inputs["hidden_states"]
    out = {form: torch.zeros(tokens.shape) for form in forms}
    for local in tqdm(range(len(inputs["gemm1_weights"])), "experts", disable=None):
        hits = chosen == int(inputs["local_expert_offset"]) + local
        mine = hits.any(-1).nonzero().squeeze(-1)
        if not len(mine):
            continue
        weight = (share * hits).sum(-1)[mine, None] * float(inputs["routed_scaling_factor"])
        up, down = (
            dequantise(inputs[f"gemm{i}_weights"][local], inputs[f"gemm{i}_weights_scale"][local])
            for i in (1, 2)
        )
        x = dequantise(tokens[mine], inputs["hidden_states_scale"][:, mine].T)
        linear, gate = (x @ up.T).chunk(2, -1)
        h = linear * torch.nn.functional.silu(gate)
        for columns in {columns for columns, _ in forms}:
            part = rounded(h, columns) @ down.T
            for form in (f for f in forms if f[0] == columns):
                kept = part.bfloat16().float() if form[1] == BFLOAT16 else part
                out[form][mine] += weight * kept
    return {form: value.bfloat16() for form, value in out.items()}


def table(definition: Definition, tokens: int, seeds: int) -> str:
    """A line for each form: the largest error of the tolerance, the root mean square relative to
    the outputs', and how many elements are wrong."""
    forms = [(c, p) for c in COLUMNS for p in (FLOAT32, BFLOAT16)]
    worst = {form: [0.0, 0.0, 0.0] for form in forms}
    for seed in range(seeds):
        inputs = make_inputs(definition, {"seq_len": tokens}, seed)
        reference = load_reference(definition)(*inputs.values()).float()
        for form, found in outputs(inputs, forms).items():
            compared = compare(found, reference.bfloat16(), tolerance(definition, "output"))
            error = (found.float() - reference).norm() / reference.norm().clamp_min(1e-30)
            new = (compared.max_error_ratio, float(error), float(compared.wrong))
            worst[form] = [max(pair) for pair in zip(worst[form], new, strict=True)]
    lines = ["columns of a scale  outputs stored as  largest error  mean error  wrong"]
    for (columns, stored), (largest, mean, wrong) in worst.items():
        name = str(columns or "not rounded")
        lines.append(f"{name:18}  {stored:17}  {largest:13.3f}  {mean:10.5f}  {wrong:5.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.study.moe_error",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--tokens", type=positive_int, default=256, help="default: 256")
    parser.add_argument("--experts", type=positive_int, default=16, help="local ones (default: 16)")
    parser.add_argument("--seeds", type=positive_int, default=1, help="default: 1")
    args = parser.parse_args(argv)
    if args.experts > 32:
        parser.error(f"argument --experts: there are 32 at most, not {args.experts}")
    definition = load(DEFINITION).resized(num_local_experts=args.experts)
    print(table(definition, args.tokens, args.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
