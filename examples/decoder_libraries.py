"""Makes the libraries that decoder.py loads, by `sample.py --library`: for batches up to 64.

    python examples/decoder_libraries.py [--device h200] [--measure yes --time-limit 10]
    python examples/decoder_libraries.py --measure recorded --records eval/measurements/h200-*.xz

Everything behind the device is given to sample.py. Where no GPU measures, kernels are chosen by the
reward that its policy was trained with; or by measurements of definitions of the same sizes, which
know more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from decoder import CONTEXT, PAGE, Shape, product_name

from ptxflow import sample
from ptxflow.env.tasks.definition import load

MOST = 64  # sequences of a batch
RESIDUAL = """def run(A, B, residual):
    return (A.float() @ B.float().T + residual.float()).to(A.dtype)
"""


def product(n: int, k: int, name: str, folder: Path) -> str:
    """The definition of a bfloat16 product with a weight [n, k], as a file; by its name one that
    adds a residual."""
    data = load("gemm_n4096_k4096").to_json() | {"name": f"llama_{name}"}
    if name.endswith("residual"):
        data["op_type"] = "gemm_epilogue"
        data["inputs"]["residual"] = dict(data["outputs"]["C"])
        data["reference"] = RESIDUAL
    data["axes"] = {"M": {"type": "var"}} | {
        name: {"type": "const", "value": value} for name, value in (("N", n), ("K", k))
    }
    for tensor in (*data["inputs"].values(), *data["outputs"].values()):
        tensor["dtype"] = "bfloat16"
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data))
    return str(path)


def wanted(shape: Shape, folder: Path) -> dict[str, list[str]]:
    """What sample.py is asked for, by library: definition, ranges, and which tensors kernels may
    read while what is before them still runs."""
    rows = f"batch_size=1:{MOST}"
    attention = f"gqa_paged_decode_h{shape.heads}_kv{shape.kv_heads}_d{shape.dim}_ps{PAGE}"
    found = {
        "norm": [f"rmsnorm_h{shape.hidden}", rows, "--chain", "weight"],
        "sampling": [f"top_p_sampling_from_probs_v{shape.vocab}", rows, "--chain"],
        "attention": [attention, rows, f"num_kv_indices=1:{MOST * CONTEXT // PAGE}", "--chain"],
    }
    for n, k in shape.products:
        name = product_name(n, k, shape)
        found[name] = [product(n, k, name, folder), f"M=1:{MOST}", "--chain", "B"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--libraries", type=Path, default=Path("out/decoder"), metavar="DIR")
    parser.add_argument("--device", default="h200", help="h200, h100 or b200 (default: h200)")
    args, more = parser.parse_known_args()
    args.libraries.mkdir(parents=True, exist_ok=True)
    for name, (definition, *axes) in wanted(Shape(), args.libraries).items():
        given = ["--definition", definition, "--axes", *axes, "--device", args.device]
        if code := sample.main([*given, "--library", str(args.libraries / name), *more]):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
