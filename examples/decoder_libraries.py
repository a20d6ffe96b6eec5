"""Makes the libraries that decoder.py loads, by `sample.py --library`: for batches up to 64.

    python examples/decoder_libraries.py [--device h200] [--measure yes --time-limit 10]

Everything behind the device is given to sample.py. Where no GPU measures, kernels are chosen by the
reward that its policy was trained with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from decoder import CONTEXT, PAGE, Shape

from ptxflow import sample
from ptxflow.env.tasks.definition import load

MOST = 64  # sequences of a batch


def product(n: int, k: int, folder: Path) -> str:
    """The definition of a bfloat16 product with a weight [n, k], as a file."""
    data = load("gemm_n4096_k4096").to_json() | {"name": f"llama_n{n}_k{k}"}
    data["axes"] = {"M": {"type": "var"}} | {
        name: {"type": "const", "value": value} for name, value in (("N", n), ("K", k))
    }
    for tensor in (*data["inputs"].values(), *data["outputs"].values()):
        tensor["dtype"] = "bfloat16"
    path = folder / f"n{n}_k{k}.json"
    path.write_text(json.dumps(data))
    return str(path)


def wanted(shape: Shape, folder: Path) -> dict[str, list[str]]:
    """What sample.py is asked for, by library."""
    rows = f"batch_size=1:{MOST}"
    attention = f"gqa_paged_decode_h{shape.heads}_kv{shape.kv_heads}_d{shape.dim}_ps{PAGE}"
    found = {
        "norm": [f"rmsnorm_h{shape.hidden}", rows],
        "sampling": [f"top_p_sampling_from_probs_v{shape.vocab}", rows],
        "attention": [attention, rows, f"num_kv_indices=1:{MOST * CONTEXT // PAGE}"],
    }
    for n, k in shape.products:
        found[f"n{n}_k{k}"] = [product(n, k, folder), f"M=1:{MOST}"]
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
