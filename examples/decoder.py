"""Decoding with Llama-3-8B's shapes: libraries of ptxflow, FlashInfer with cuBLAS, torch.compile.

    python examples/decoder_libraries.py     # the libraries, for batches up to 64, on any machine
    python examples/decoder.py               # on an H200: tokens/s, where the time goes, values

A step is `--layers` layers and the head: RMSNorm, projections, the new key and value into a paged
cache, attention over 4,096 tokens, MLP, logits, softmax, top-p sampling: one CUDA graph, that draws
anew at every replay. Weights are random; the embeddings of tokens and positions are left out, in
all three. torch.compile (max-autotune) has no pages. Values are compared with float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from decoder_timing import graphed, kernels, table, timed
from torch import Tensor

PAGE, CONTEXT, TOP_P, EPS = 64, 4096, 0.9, 1e-5


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes, by default Llama-3-8B's."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    mlp: int = 14336
    vocab: int = 128256

    @property
    def products(self) -> list[tuple[int, int]]:
        """[N, K] of the weights: queries with keys and values, output, gate with up, down, head."""
        h, qkv = self.hidden, (self.heads + 2 * self.kv_heads) * self.dim
        return [(qkv, h), (h, h), (2 * self.mlp, h), (h, self.mlp), (self.vocab, h)]


def product_name(n: int, k: int, shape: Shape) -> str:
    """Of a product's library; those that end at the residual's width add it."""
    return f"n{n}_k{k}" + "_residual" * (n == shape.hidden)


class Model:
    """Random weights and caches [tokens, heads, dim]. Every sequence has `context` tokens, the
    newest not yet written, in pages that lie in any order."""

    def __init__(self, shape: Shape, layers: int, batch: int, context: int, device: str) -> None:
        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16) * scale

        s, h, pages = shape, shape.hidden, context // PAGE
        weights = dict(zip(("qkv", "o", "gate_up", "down"), s.products, strict=False))
        self.shape, self.layers = shape, [
            {"norm": 1 + normal(h, scale=0.1), "mlp_norm": 1 + normal(h, scale=0.1),
             "k_cache": normal(batch * context, s.kv_heads, s.dim),
             "v_cache": normal(batch * context, s.kv_heads, s.dim),
             **{name: normal(n, k, scale=k**-0.5) for name, (n, k) in weights.items()}}
            for _ in range(layers)
        ]  # fmt: skip
        self.top = {"norm": 1 + normal(h, scale=0.1), "head": normal(s.vocab, h, scale=h**-0.5)}
        order = torch.randperm(batch * pages, device=device).int()
        each = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.index = {
            "indptr": each * pages, "indices": order, "sequence": each[:-1],
            "position": torch.full_like(each[:-1], context - 1),
            "last_len": torch.full_like(each[:-1], PAGE),
            "slot": order.view(batch, pages)[:, -1].long() * PAGE + PAGE - 1,
        }  # fmt: skip

    def caches(self, layer: int) -> list[Tensor]:
        """Keys and values of a layer, [pages, page size, heads, dim]."""
        s = self.shape
        both = (self.layers[layer][name] for name in ("k_cache", "v_cache"))
        return [cache.view(-1, PAGE, s.kv_heads, s.dim) for cache in both]


class Torch:
    """The operations of a step in torch alone, computed in `dtype`; others replace some of them."""

    name = "torch.compile"
    mode: str | None = "max-autotune-no-cudagraphs"  # of torch.compile; None: as it is
    options: ClassVar[dict[str, bool]] = {}  # of it, in place of a mode
    dtype = torch.bfloat16

    def __init__(self, model: Model, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.scale, self.dtype = model, model.shape.dim**-0.5, dtype
        order, s = model.index["indices"].long(), model.shape
        self.caches = [  # [batch, context, heads, dim], without pages
            [cache[order].view(len(model.index["sequence"]), -1, s.kv_heads, s.dim)
             for cache in model.caches(layer)] for layer in range(len(model.layers))
        ]  # fmt: skip

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.dtype), (x.shape[-1],), weight.to(self.dtype), EPS)

    def add_norm(self, y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + y
        return self.norm(residual, weight), residual

    def next_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A product added to the residual, normalised, and the new residual."""
        return self.add_norm(self.linear(x, weight), residual, norm)

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for cache, new in zip(self.caches[layer], (k, v), strict=True):
            cache[:, -1] = new
        keys, values = (c.to(self.dtype).transpose(1, 2) for c in self.caches[layer])
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, scale=self.scale,
                                              enable_gqa=True)[:, :, 0]  # fmt: skip

    def sample(self, probs: Tensor, top_p: Tensor) -> Tensor:
        values, order = probs.sort(-1, descending=True)
        kept = values * (values.cumsum(-1) - values <= top_p[:, None])
        drawn = (kept / torch.empty_like(kept).exponential_()).argmax(-1, keepdim=True)
        return order.gather(-1, drawn)[:, 0]

    def step(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and probabilities [batch, vocab] of hidden states [batch, hidden]."""
        s, layers, residual = self.model.shape, self.model.layers, hidden
        x = self.norm(hidden, layers[0]["norm"])
        for i, layer in enumerate(layers):
            qkv = self.linear(x, layer["qkv"]).view(len(x), -1, s.dim)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)
            y = self.attention(q, k, v, i).flatten(1)
            x, residual = self.next_norm(y, layer["o"], residual, layer["mlp_norm"])
            y = self.gated(self.linear(x, layer["gate_up"]))
            following = layers[i + 1] if i + 1 < len(layers) else self.model.top
            x, residual = self.next_norm(y, layer["down"], residual, following["norm"])
        logits = self.linear(x, self.model.top["head"])
        return logits, logits.float().softmax(-1)


class Ptxflow(Torch):
    """Libraries for products, norms, attention, sampling; torch.compile fuses what is between.
    Every kernel begins while the one before it runs, and products load weights meanwhile."""

    name, mode = "ptxflow", "default"
    options: ClassVar[dict[str, bool]] = {"triton.enable_pdl": True}

    def __init__(self, model: Model, folder: Path) -> None:
        import ptxflow

        self.model, self.scale = model, model.shape.dim**-0.5
        self.products: dict[tuple[int, ...], Any] = {
            nk: ptxflow.load(folder / product_name(*nk, model.shape)) for nk in model.shape.products
        }
        others = ("norm", "attention", "sampling")
        self.normed, self.attended, self.sampled = (ptxflow.load(folder / n) for n in others)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.products[tuple(weight.shape)](x, weight)

    def next_norm(
        self, x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = self.products[tuple(weight.shape)](x, weight, residual)
        return self.norm(residual, norm), residual

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.normed(x, weight)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        i = self.model.index
        for name, new in (("k_cache", k), ("v_cache", v)):  # graph inputs, so written in place
            self.model.layers[layer][name].index_copy_(0, i["slot"], new)
        return self.attended(q.contiguous(), *self.model.caches(layer), i["indptr"], i["indices"],
                             i["last_len"], self.scale)[0]  # fmt: skip

    def sample(self, probs: Tensor, top_p: Tensor) -> Tensor:
        return self.sampled(probs, top_p)


class FlashInfer(Torch):
    """FlashInfer's kernels, and cuBLAS through torch."""

    name, mode = "FlashInfer + cuBLAS", None

    def __init__(self, model: Model) -> None:
        import flashinfer

        self.model, self.scale, self.lib = model, model.shape.dim**-0.5, flashinfer
        self.dtype = torch.bfloat16
        room = torch.empty(128 << 20, dtype=torch.uint8, device=model.index["indptr"].device)
        i, s, make = model.index, model.shape, flashinfer.BatchDecodeWithPagedKVCacheWrapper
        self.plan = make(room, "NHD", use_tensor_cores=True)
        self.plan.plan(i["indptr"], i["indices"], i["last_len"], s.heads, s.kv_heads, s.dim, PAGE,
                       q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
                       sm_scale=self.scale)  # fmt: skip

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.lib.rmsnorm(x, weight, eps=EPS)

    def add_norm(self, y: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        self.lib.fused_add_rmsnorm(y, residual, weight, eps=EPS)  # both in place
        return y, residual

    def gated(self, gate_up: Tensor) -> Tensor:
        return self.lib.silu_and_mul(gate_up)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        i = self.model.index
        cache = tuple(self.model.caches(layer))
        self.lib.append_paged_kv_cache(k, v, i["sequence"], i["position"], cache, i["indices"],
                                       i["indptr"], i["last_len"])  # fmt: skip
        return self.plan.run(q, cache)

    def sample(self, probs: Tensor, top_p: Tensor) -> Tensor:
        seed, at = torch.empty(2, dtype=torch.int64, device=probs.device).random_().split(1)
        return self.lib.sampling.top_p_sampling_from_probs(probs, top_p, seed=seed, offset=at)

    def step(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(hidden.clone())  # which the first addition changes


@torch.no_grad()
def compare(args: argparse.Namespace, batch: int) -> bool:
    """Print a batch's tables; whether ptxflow's values are as near to float32 as the others'."""
    model = Model(Shape(), args.layers, batch, CONTEXT, "cuda")
    hidden = torch.randn(batch, model.shape.hidden, device="cuda").bfloat16()
    top_p = torch.full((batch,), TOP_P, device="cuda")
    expected = Torch(model, torch.float32).step(hidden)[0]
    makers: dict[str, Callable[[Model], Torch]] = {
        Ptxflow.name: partial(Ptxflow, folder=args.libraries),
        FlashInfer.name: FlashInfer,
        Torch.name: Torch,
    }
    calls, errors = dict[str, Callable[[], Tensor]](), dict[str, float]()
    held = []  # graphs read kernels, plans and workspaces
    for name, maker in makers.items():
        if args.only not in (None, name):
            continue
        try:
            ops = maker(model)
            held.append(ops)
            call, logits = graphed(ops.step, ops.sample, ops.mode, ops.options, hidden, top_p)
        except (ImportError, RuntimeError, ValueError) as error:  # the others are told without it
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        calls[name] = call
        call()
        errors[name] = float((logits - expected).norm() / expected.norm())
    print(f"\nbatch {batch}, {args.layers} layers and head, context {CONTEXT}")
    print(table(timed(calls), errors, batch))
    for name, call in calls.items():
        print(f"\n{name}, by kernel\n{kernels(call)}")
    others = [e for n, e in errors.items() if n != Ptxflow.name]
    return errors.get(Ptxflow.name, 1.0) <= (1.5 * max(others) if others else 0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--libraries", type=Path, default=Path("out/decoder"), metavar="DIR")
    add("--batch", type=int, nargs="+", default=[1, 16, 64])
    add("--layers", type=int, default=8)
    add("--only", help="one of the three, by its name in the tables")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    return 0 if all([compare(args, batch) for batch in args.batch]) else 1


if __name__ == "__main__":
    sys.exit(main())
