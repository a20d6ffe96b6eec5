"""What a call costs the host: loaded libraries beside torch's and FlashInfer's own, on a GPU.

    python -m ptxflow.eval.bench.call_cost

One kernel a definition is compiled, loaded as a library, and called in turns with its peers, in the
same loop: with tensors that are fresh at every call, with the same ones, into given outputs, and
replayed as a CUDA graph of 20 calls. Microseconds of wall time a call, the median of rounds; the
kernels are shorter than the calls, and the device is waited for between rounds.
"""

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend.runtime import RuntimeUnavailable, gpu_info, require_gpu
from ptxflow.compiler.compilation import CompiledKernel, compile_kernel
from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.launch import TensorMapParam
from ptxflow.compiler.library.call import LAUNCHERS, Kernel, load
from ptxflow.compiler.library.manifest import write_library
from ptxflow.compiler.library.member import single
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.definition import load as definition_of
from ptxflow.eval.bench.candidates import sample_workload
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.session import case_of
from ptxflow.eval.bench.tolerance import tolerance

CALLS, SETS, GRAPH_CALLS = 200, 64, 20
Call = Callable[[Sequence[Any]], Any]  # of the inputs in the definition's order


@dataclass(frozen=True)
class Row:
    """A definition at some axes, and what its kernel must have to stand for its kind."""

    definition: str
    axes: Mapping[str, int]
    maps: int  # tensor maps, at least
    launches: int
    peers: Mapping[str, Callable[[Sequence[Any]], Call]]


def _flashinfer(name: str) -> Any:
    return getattr(importlib.import_module("flashinfer"), name)


def _decode(inputs: Sequence[Any]) -> Call:
    """FlashInfer's planned decoding on tensor cores; its plan is made once, for these lengths."""
    q, k, _, indptr, indices, last, scale = inputs
    room = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = _flashinfer("BatchDecodeWithPagedKVCacheWrapper")(room, "NHD", use_tensor_cores=True)
    page, heads, dim = k.shape[1:]
    wrapper.plan(indptr, indices, last, q.shape[1], heads, dim, page, q_data_type=q.dtype,
                 kv_data_type=k.dtype, sm_scale=scale)  # fmt: skip
    return lambda t: wrapper.run(t[0], (t[1], t[2]), return_lse=True)


ROWS = (
    Row("rmsnorm_h4096", {"batch_size": 16}, 0, 1, {
        "torch.rms_norm": lambda _: lambda t: torch.rms_norm(t[0], (4096,), t[1], 1e-6),
        "flashinfer.rmsnorm": lambda _: (
            lambda f: lambda t: f(t[0], t[1], eps=1e-6))(_flashinfer("rmsnorm")),
    }),
    Row("gemm_n4096_k4096", {"M": 16}, 2, 1, {
        "torch.mm": lambda _: lambda t: torch.mm(t[0], t[1].T),
        "torch linear": lambda _: lambda t: torch.nn.functional.linear(t[0], t[1]),
    }),
    Row("gqa_paged_decode_h32_kv8_d128_ps64",
        {"batch_size": 4, "num_pages": 16, "len_indptr": 5, "num_kv_indices": 16}, 0, 2,
        {"flashinfer run": _decode}),
)  # fmt: skip


def kernel_for(row: Row, device: Device) -> tuple[Definition, CompiledKernel]:
    """A kernel of the row's kind: of seeded strategies, the one with the most tensor maps."""
    definition = definition_of(row.definition)
    found = sample_workload(definition, row.axes, device, count=64, seed=1)
    fitting = []
    for c in found.candidates:
        launch = c.family.launch(c.problem, c.strategy, device)
        maps = sum(isinstance(p, TensorMapParam) for s in launch.steps for p in s.params)
        if len(launch.steps) == row.launches and maps >= row.maps:
            fitting.append((maps, c))
    best = max(fitting, key=lambda pair: pair[0])[1]
    return definition, compile_kernel(best.problem, best.strategy, device)


def library_of(definition: Definition, kernel: CompiledKernel, folder: Path) -> Path:
    """A library of this one kernel for all sizes, in the folder."""
    write_library(folder, *single(definition.to_json(), kernel))
    return folder


def _timed(call: Call, sets: Sequence[Sequence[Any]]) -> float:
    """Microseconds a call of one round."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(CALLS):
        call(sets[i % len(sets)])
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def _graphed(call: Call, inputs: Sequence[Any]) -> Call:
    """A replay of GRAPH_CALLS calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call(inputs)

    def replay(_: Sequence[Any]) -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def fresh_sets(inputs: Sequence[Any]) -> list[list[Any]]:
    """The same inputs at other addresses each."""
    return [[a.clone() if isinstance(a, torch.Tensor) else a for a in inputs] for _ in range(SETS)]


def measure(contenders: Mapping[str, Call], into: Mapping[str, Call], inputs: Sequence[Any],
            rounds: int) -> dict[str, dict[str, float]]:  # fmt: skip
    """Medians by contender and column; `into` are those that write given outputs."""
    sets, same = fresh_sets(inputs), [inputs]
    graphs = {name: _graphed(call, inputs) for name, call in contenders.items()}
    columns: dict[str, tuple[Mapping[str, Call], Sequence[Sequence[Any]], int]] = {
        "fresh": (contenders, sets, 1), "seen": (contenders, same, 1), "out=": (into, sets, 1),
        "graph": (graphs, same, GRAPH_CALLS),
    }  # fmt: skip
    times: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for _ in range(rounds + 3):
        for column, (calls, given, per) in columns.items():
            for name, call in calls.items():
                times[name].setdefault(column, []).append(_timed(call, given) / per)
    return {
        name: {column: statistics.median(values[3:]) for column, values in found.items()}
        for name, found in times.items()
    }


def right(kernel: Kernel, definition: Definition, inputs: Sequence[Any], peer: Call) -> str:
    """Whether outputs are within the definition's tolerance of a reference's: a word. No library
    is one: FlashInfer's lse is of probabilities rounded to bfloat16, up to 2e-4 beside it."""
    ours, theirs = kernel(*inputs), peer(inputs)
    pairs = zip(*(o if isinstance(o, tuple) else (o,) for o in (ours, theirs)), strict=True)
    for name, (a, b) in zip(definition.outputs, pairs, strict=True):
        limit = tolerance(definition, name)
        if not torch.allclose(a.float(), b.float(), rtol=limit.rtol, atol=limit.atol):
            return f"WRONG in {name}"
    return "right"


def run_row(row: Row, device: Device, rounds: int, folder: Path) -> str:
    """A table of one definition, with a line on values."""
    definition, compiled = kernel_for(row, device)
    where = library_of(definition, compiled, folder / row.definition)
    inputs = list(make_inputs(definition, row.axes, 1, "cuda").values())
    kernels = {name: load(where, launcher=name) for name in LAUNCHERS}
    contenders: dict[str, Call] = {
        f"ptxflow, {name}": (lambda k: lambda t: k(*t))(kernel) for name, kernel in kernels.items()
    }
    made = kernels["ctypes"](*inputs)
    into: dict[str, Call] = {
        f"ptxflow, {name}": (lambda k: lambda t: k(*t, out=made))(kernel)
        for name, kernel in kernels.items()
    }
    expected = case_of(definition, row.axes, torch.device("cuda")).reference(
        dict(zip(definition.inputs, inputs, strict=True))
    )
    verdict = right(kernels["native"], definition, inputs, lambda _: tuple(expected.values()))
    absent = []
    for name, make in row.peers.items():
        try:
            contenders[name] = make(inputs)
        except ImportError as error:
            absent.append(f"{name}: {error}")
    found = measure(contenders, into, inputs, rounds)
    columns = ("fresh", "seen", "out=", "graph")
    table = markdown(
        ("us a call", *columns),
        [(n, *(f"{t[c]:.2f}" if c in t else "-" for c in columns)) for n, t in found.items()],
    )
    axes = " ".join(f"{n}={v}" for n, v in row.axes.items())
    ours = found["ptxflow, native"]["fresh"]
    ratios = [f"{ours / found[n]['fresh']:.2f} of {n}" for n in row.peers if n in found]
    notes = "; ".join([f"values {verdict}", *ratios, *absent])
    return f"{row.definition} {axes}, {compiled.strategy.key}: {notes}\n{table}\n"


@reports("call-cost", RuntimeUnavailable)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.bench.call_cost", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="h200", help="default: h200")
    parser.add_argument("--rounds", type=int, default=31, help="default: 31")
    args = parser.parse_args(argv)
    device = DEVICES[args.device]
    require_gpu(device)
    info = gpu_info()
    print(f"{info.name}, driver {info.driver}, torch {torch.__version__}\n")
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            print(run_row(row, device, args.rounds, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
