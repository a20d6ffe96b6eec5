"""Definitions that serving a model needs, from its Hugging Face configuration; and their libraries.

Read are sizes alone, of Llama's, Qwen's and DeepSeek's configurations. Each operator is one of the
46 definitions, resized: whoever has a library of one of them has it for every model that shares it.
What no definition covers is named. `--libraries` makes a library of each, one after the other, and
prints the bill; the same command goes on.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ptxflow.command import BadInput, Parser, add_cluster, align, reports
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.arguments import UsageError, find_device, find_problem, positive_int
from ptxflow.env.tasks.definition import Definition, DefinitionError, load, names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.shapes import following
from ptxflow.eval.sample.ranges import find_ranges

BILL = "bill.jsonl"
#: model_type begins with -> whether queries and keys of a head are normalised
MODELS = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True, "deepseek": False}


class Config:
    """A model's configuration, of which a key that is missing is a BadInput that names it."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where = data, where

    def __getitem__(self, name: str) -> int:
        value = self.data.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadInput(f"{self.where}: {name!r} must be a positive integer, not {value!r}")
        return value

    def get(self, name: str, otherwise: int = 0) -> int:
        return self[name] if self.data.get(name) is not None else otherwise


@dataclass(frozen=True)
class Serving:
    """How a model is served: GPUs that heads and columns, or experts, are spread over; tokens of a
    page; the most sequences, tokens at a time, and tokens of a sequence."""

    tp: int = 1
    ep: int = 1
    page: int = 64
    batch: int = 256
    tokens: int = 8192
    context: int = 8192

    def share(self, count: int, what: str) -> int:
        """Of heads or columns, those of one GPU. BadInput where they cannot be spread."""
        if count % self.tp:
            raise BadInput(f"--tp {self.tp}: {count} {what} cannot be spread over as many GPUs")
        return count // self.tp

    def ranges(self, definition: Definition) -> list[str]:
        """Of the variable axes, as `--axes` takes them."""
        lengths = self.batch * self.context
        most = {
            "M": self.tokens, "seq_len": self.tokens, "num_tokens": self.tokens,
            "total_q": self.tokens, "total_seq_len": self.tokens, "num_seqs": self.batch,
            "batch_size": self.tokens if definition.op_type == "rmsnorm" else self.batch,
            "len_indptr": self.batch + 1, "max_num_pages": -(-self.context // self.page),
            "total_kv": max(self.tokens, self.context),
            "num_kv_indices": -(-lengths // definition.const_axes.get("page_size", 1)),
        }  # fmt: skip
        tied = {"len_indptr"} if "batch_size" in definition.var_axes else set()
        free = [n for n in definition.var_axes if n in most and n not in tied]
        return [f"{n}={2 if n == 'len_indptr' else 1}:{most[n]}" for n in free]


@dataclass(frozen=True)
class Need:
    """An operator of a model: one of the 46 with other constants, in that many layers."""

    definition: Definition
    what: str

    @property
    def known(self) -> bool:
        return self.definition.name in names()


def need(template: str, name: str, what: str, **constants: int) -> Need:
    """`template` with these constants, and what follows from them, under a name of its own."""
    if name in names():
        return Need(load(name), what)
    base = load(template)
    whole = following({**base.const_axes, **constants})
    return Need(base.sized(name, whole, f"{what}: "), what)


def gemm(n: int, k: int, what: str) -> Need:
    return need("gemm_n4096_k4096", f"gemm_n{n}_k{k}", what, N=n, K=k)


def norms(hidden: int, what: str, added: bool = False) -> Iterator[Need]:
    yield need("rmsnorm_h4096", f"rmsnorm_h{hidden}", what, hidden_size=hidden)
    if added:
        name = f"fused_add_rmsnorm_h{hidden}"
        yield need("fused_add_rmsnorm_h4096", name, f"{what} of a residual sum", hidden_size=hidden)


def sampling(config: Config) -> Iterator[Need]:
    for kind in ("top_k", "top_p", "top_k_top_p"):
        stem = f"{kind}_sampling_from_probs_v"
        name, vocabulary = f"{stem}{config['vocab_size']}", config["vocab_size"]
        yield need(f"{stem}128256", name, "sampling", vocab_size=vocabulary)


def gqa(config: Config, serving: Serving) -> Iterator[Need]:
    """Attention of grouped queries with its projections."""
    whole, hidden = config["num_attention_heads"], config["hidden_size"]
    heads = serving.share(whole, "heads")
    kv = max(1, config.get("num_key_value_heads", whole) // serving.tp)
    dim = config.get("head_dim") or hidden // whole
    yield gemm((heads + 2 * kv) * dim, hidden, "projection of queries, keys and values")
    yield gemm(hidden, heads * dim, "projection of attention's output")
    if MODELS[model(config)]:
        yield from norms(dim, "norm of queries and keys")
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv, "head_dim": dim}
    tail = f"h{heads}_kv{kv}_d{dim}"
    for kind in ("paged_decode", "paged_prefill_causal"):
        form, name = 64 if serving.page > 1 else 1, f"gqa_{kind}_{tail}_ps{serving.page}"
        what = "attention of one token" if kind == "paged_decode" else "attention of a prompt"
        template = f"gqa_{kind}_h32_kv8_d128_ps{form}"
        yield need(template, name, what, page_size=serving.page, **sizes)
    name = f"gqa_ragged_prefill_causal_{tail}"
    what = "attention of a prompt without a cache"
    yield need("gqa_ragged_prefill_causal_h32_kv8_d128", name, what, **sizes)


def mla(config: Config, serving: Serving) -> Iterator[Need]:
    """Multi-head latent attention with its projections."""
    hidden, heads = config["hidden_size"], serving.share(config["num_attention_heads"], "heads")
    ckv, kpe = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query = heads * (config["qk_nope_head_dim"] + kpe)
    if rank := config.get("q_lora_rank"):
        yield gemm(rank, hidden, "projection to latent queries")
        yield gemm(query, rank, "projection of latent queries")
        yield from norms(rank, "norm of latent queries")
    else:
        yield gemm(query, hidden, "projection of queries")
    yield gemm(ckv + kpe, hidden, "projection to latent keys")
    yield gemm(hidden, heads * config["v_head_dim"], "projection of attention's output")
    yield from norms(ckv, "norm of latent keys")
    sizes = {"num_qo_heads": heads, "head_dim_ckv": ckv, "head_dim_kpe": kpe}
    sizes["page_size"] = serving.page
    form, tail = 64 if serving.page > 1 else 1, f"h{heads}_ckv{ckv}_kpe{kpe}"
    if topk := config.get("index_topk"):
        template = f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{form}"
        name = f"dsa_sparse_attention_{tail}_topk{topk}_ps{serving.page}"
        yield need(template, name, "attention to chosen tokens", topk=topk, **sizes)
        own = {
            "num_index_heads": config["index_n_heads"],
            "index_head_dim": config["index_head_dim"],
        }
        name = (f"dsa_topk_indexer_fp8_h{own['num_index_heads']}_d{own['index_head_dim']}"
                f"_topk{topk}_ps64")  # fmt: skip
        yield need("dsa_topk_indexer_fp8_h64_d128_topk256_ps64", name, "choice of tokens",
                   topk=topk, **own)  # fmt: skip
    for kind in ("paged_decode", "paged_prefill_causal"):
        what = "attention of one token" if kind == "paged_decode" else "attention of a prompt"
        template = f"mla_{kind}_h16_ckv512_kpe64_ps{form}"
        yield need(template, f"mla_{kind}_{tail}_ps{serving.page}", what, **sizes)


def mlp(config: Config, serving: Serving) -> Iterator[Need]:
    hidden = config["hidden_size"]
    inner = serving.share(config["intermediate_size"], "columns of the MLP")
    yield gemm(2 * inner, hidden, "gate and up projection")
    yield gemm(hidden, inner, "down projection")


def moe(config: Config, serving: Serving) -> Iterator[Need]:
    """DeepSeek's experts: sigmoid routing in groups, FP8 with block scales."""
    experts, hidden = config["n_routed_experts"], config["hidden_size"]
    if experts % serving.ep:
        raise BadInput(f"--ep {serving.ep}: {experts} experts cannot be spread over as many GPUs")
    yield gemm(experts, hidden, "router")
    local, inner = experts // serving.ep, config["moe_intermediate_size"]
    form = f"topk{config['num_experts_per_tok']}_ng{config['n_group']}_kg{config['topk_group']}"
    name = f"moe_fp8_block_scale_ds_routing_{form}_e{local}_h{hidden}_i{inner}"
    template = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
    if f"_{form}_" in template:
        sizes = {"num_experts": experts, "num_local_experts": local, "hidden_size": hidden}
        yield need(template, name, "experts", intermediate_size=inner, **sizes)
    shared = serving.share(inner * config.get("n_shared_experts", 1), "columns of shared experts")
    yield gemm(2 * shared, hidden, "gate and up projection of shared experts")
    yield gemm(hidden, shared, "down projection of shared experts")


def model(config: Config) -> str:
    """Its row of MODELS; BadInput where it has none."""
    kind = str(config.data.get("model_type"))
    for name in MODELS:
        if kind.startswith(name):
            return name
    raise BadInput(f"{config.where}: model_type {kind!r} is not known; {', '.join(MODELS)} are")


def needs(config: Config, serving: Serving) -> tuple[list[Need], list[str]]:
    """The operators of a model, each definition once, and what no definition covers."""
    model(config)
    missing = list[str]()
    latent, routed = "kv_lora_rank" in config.data, config.get("n_routed_experts")
    hidden, columns = config["hidden_size"], serving.share(config["vocab_size"], "logits")
    found = [*norms(hidden, "norm", added=True), gemm(columns, hidden, "logits")]
    found += sampling(config)
    found += mla(config, serving) if latent else gqa(config, serving)
    if routed:
        found += moe(config, serving)
    sparse = routed or config.get("num_experts")
    if not sparse or config.data.get("first_k_dense_replace") or config.data.get("mlp_only_layers"):
        found += mlp(config, serving)
    if (n := config.get("num_experts")) and not routed:
        found.append(gemm(n, hidden, "router"))
        missing.append("experts in bfloat16 behind softmax routing")
    if routed and not any(f.what == "experts" for f in found):
        missing.append("experts routed otherwise than 8 of 8 groups, 4 kept")
    if config.data.get("quantization_config") and not latent:
        missing.append("quantised projections: bfloat16 or float16 ones are written instead")
    unique = {f.definition.name: f for f in found}
    return [f for f in unique.values() if _taken(f, serving, missing)], missing


def _taken(found: Need, serving: Serving, missing: list[str]) -> bool:
    """Whether a family builds kernels for the definition; else why not is said to be missing."""
    try:
        asked, _ = find_ranges(found.definition, serving.ranges(found.definition))
        least = {n: low for n, (low, _) in asked.free.items()}
        find_problem(found.definition, axes_of(found.definition, asked.axes(least)))
    except (UsageError, DefinitionError) as error:
        missing.append(f"{found.what}: {error}")
        return False
    return True


# The command -------------------------------------------------------------------------------------


def read_config(path: Path) -> Config:
    """BadInput for what is no configuration; OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BadInput(f"{path}: a model's configuration is a JSON object")
    return Config(data.get("text_config") or data, str(path))


def write(found: Sequence[Need], folder: Path) -> list[str]:
    """Definitions that are none of the 46, as JSON; and what `--definition` is given for each."""
    given = []
    for one in found:
        path = folder / "definitions" / f"{one.definition.name}.json"
        if not one.known:
            write_whole(path, json.dumps(one.definition.to_json(), indent=1) + "\n")
        given.append(one.definition.name if one.known else str(path))
    return given


def library(given: str, axes: Sequence[str], folder: Path, args: argparse.Namespace) -> list[str]:
    """The command that makes a definition's library."""
    command = ["--definition", given, "--axes", *axes, "--library", str(folder)]
    command += ["--device", args.device, "--members", str(args.members), "--measure", args.measure]
    if args.time_limit:
        command += ["--time-limit", str(args.time_limit)]
    return command


def make(commands: Mapping[str, list[str]], args: argparse.Namespace) -> int:
    """A library of each that is not there; how many failed. A line of the bill each, appended."""
    failed = 0
    for name, command in tqdm(commands.items(), desc="libraries", unit="library"):
        if (args.out / "libraries" / name / "manifest.json").exists():
            continue
        began = time.monotonic()
        run = subprocess.run([sys.executable, "-m", "ptxflow", "sample", *command])
        if run.returncode == 130:
            raise KeyboardInterrupt
        failed += run.returncode != 0
        row = {"name": name, "seconds": time.monotonic() - began, "code": run.returncode}
        with (args.out / BILL).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return failed


def bill(args: argparse.Namespace) -> str:
    """A line a library: its kernels, what was measured for it, the seconds it took."""
    from ptxflow.eval.bench.records import read_records

    spent: dict[str, float] = {}
    path = args.out / BILL
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        spent[row["name"]] = spent.get(row["name"], 0.0) + row["seconds"]
    rows = [("library", "kernels", "measured", "seconds")]
    totals = [0, 0, 0.0]
    for folder in sorted((args.out / "libraries").glob("*/manifest.json")):
        kernels = len(json.loads(folder.read_text())["members"])
        records = folder.parent.with_name(f"{folder.parent.name}.records.jsonl")
        measured = len(read_records(records)) if records.exists() else 0
        seconds = spent.get(folder.parent.name, 0.0)
        rows.append((folder.parent.name, str(kernels), str(measured), f"{seconds:.0f}"))
        totals = [totals[0] + kernels, totals[1] + measured, totals[2] + seconds]
    rows.append(("in all", str(totals[0]), str(totals[1]), f"{totals[2]:.0f}"))
    return align(rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="ptxflow model-shapes",
        description=__doc__,
        epilog="""examples:
  what Llama 3 8B needs on one GPU:
    ptxflow model-shapes llama/config.json --out out/llama
  DeepSeek V3 on eight GPUs, heads and experts spread over them:
    ptxflow model-shapes deepseek/config.json --tp 8 --ep 8 --out out/deepseek
  its libraries, measured on a cluster, two minutes of a GPU each:
    ptxflow model-shapes deepseek/config.json --tp 8 --ep 8 --out out/deepseek \\
        --libraries --time-limit 120 --cluster tcp://host:8786

exit code: 0 all right, 1 a library could not be made, 2 bad input""",
    )
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="config.json of a model")
    add("--out", type=Path, required=True, metavar="DIR", help="for definitions and libraries")
    own = Serving()
    about = "GPUs that heads and columns, or experts, are spread over"
    for name, text in (("tp", about), ("ep", "GPUs that experts are spread over"),
                       ("page", "tokens of a page of the cache"), ("batch", "most sequences"),
                       ("tokens", "most tokens at a time"),
                       ("context", "most tokens of a sequence")):  # fmt: skip
        default = getattr(own, name)
        add(f"--{name}", type=positive_int, default=default, help=f"{text} (default: {default})")
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--libraries", action="store_true", help="make a library of each definition")
    add("--members", type=positive_int, default=8, help="kernels of a library (default: 8)")
    add("--measure", choices=("auto", "yes", "no"), default="auto", help="as of ptxflow sample")
    add("--time-limit", type=float, metavar="SECONDS", help="of measuring, a library")
    add_cluster(parser)
    return parser.parse_args(argv)


@reports("model-shapes")
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    find_device(args.device)
    serving = Serving(args.tp, args.ep, args.page, args.batch, args.tokens, args.context)
    found, missing = needs(read_config(args.config), serving)
    commands, rows = {}, [("definition", "of the 46", "what", "ranges")]
    for one, given in zip(found, write(found, args.out), strict=True):
        name, axes = one.definition.name, serving.ranges(one.definition)
        commands[name] = library(given, axes, args.out / "libraries" / name, args)
        rows.append((name, "yes" if one.known else "no", one.what, " ".join(axes)))
    print(align(rows))
    for line in missing:
        print(f"not covered: {line}")
    lines = [f"python -m ptxflow sample {' '.join(command)}\n" for command in commands.values()]
    write_whole(args.out / "libraries.sh", "".join(lines))
    if not args.libraries:
        print(f"{len(found)} libraries: --libraries makes them, or {args.out}/libraries.sh")
        return 0
    failed = make(commands, args)
    print(bill(args))
    return 1 if failed else 0
