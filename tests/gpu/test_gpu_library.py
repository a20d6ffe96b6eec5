"""Loaded libraries on the GPU: values, streams, threads, graphs, torch.compile, memory."""

import ctypes
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ptxflow
from ptxflow.compiler.backend.runtime import Driver, GpuInfo, encode_tensor_map
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import H200
from ptxflow.compiler.launch import TensorMapParam
from ptxflow.compiler.library.call import LAUNCHERS, Kernel
from ptxflow.compiler.library.plan import address_word
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.call_cost import ROWS, kernel_for, library_of, right
from ptxflow.eval.bench.candidates import sample_workload
from ptxflow.eval.bench.inputs import make_inputs

pytestmark = pytest.mark.gpu
NORM, GEMM, DECODE = ROWS


@pytest.fixture(scope="module")
def folders(gpu: GpuInfo, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("libraries")
    return {
        row.definition: library_of(*kernel_for(row, H200), root / row.definition) for row in ROWS
    }


def inputs(name: str, **axes: int) -> list[Any]:
    return list(make_inputs(load(name), axes, 1, "cuda").values())


def expected(name: str, given: list[Any]) -> Any:
    """The reference, on the CPU."""
    space: dict[str, Any] = {}
    exec(load(name).source, space)
    moved = [a.cpu() if isinstance(a, torch.Tensor) else a for a in given]
    out = space["run"](*moved)
    out = tuple(out.values()) if isinstance(out, dict) else out
    return tuple(t.cuda() for t in out) if isinstance(out, tuple | list) else out.cuda()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("m", [1, 16, 77])
def test_values(folders: Mapping[str, Path], launcher: str, m: int) -> None:
    for row in (NORM, GEMM):
        kernel = ptxflow.load(folders[row.definition], launcher=launcher)
        (axis,) = row.axes
        for _ in range(2):
            given = inputs(row.definition, **{axis: m})
            peer = expected(row.definition, given)
            assert right(kernel, load(row.definition), given, lambda t, p=peer: p) == "right"  # type: ignore[misc]
    kernel = ptxflow.load(folders[DECODE.definition], launcher=launcher)
    given = inputs(DECODE.definition, **DECODE.axes)
    peer = expected(DECODE.definition, given)
    for _ in range(2):
        assert right(kernel, load(DECODE.definition), given, lambda t: peer) == "right"


def test_the_address_of_a_tensor_map_is_found(gpu: GpuInfo) -> None:
    driver = Driver()
    driver.use_context()
    param = TensorMapParam("A", "float16", ("4096", "64"), ("8192",), (64, 64), 128)
    maps = []
    for address in (1 << 32, 5 << 33):
        _storage, start = encode_tensor_map(driver, param, address, {})
        maps.append(ctypes.string_at(start, 128))
    assert address_word(maps, (1 << 32, 5 << 33)) == 0


def test_rows_apart_are_read_where_they_lie(folders: Mapping[str, Path]) -> None:
    kernel = ptxflow.load(folders[GEMM.definition])
    whole = torch.randn(16, 8192, device="cuda").half()
    b = torch.randn(4096, 4096, device="cuda").half()
    for a in (whole[:, :4096], whole[:, 4096:], whole[::2, 8:4104]):
        torch.testing.assert_close(kernel(a, b), kernel(a.contiguous(), b))


def test_a_graph_replays_new_values(folders: Mapping[str, Path]) -> None:
    for row in ROWS:
        kernel = ptxflow.load(folders[row.definition])
        given = inputs(row.definition, **row.axes)
        kernel(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(*given)
        given[0].copy_(given[0].flip(0) * 0.5)
        graph.replay()
        torch.testing.assert_close(out, kernel(*given))


def test_a_first_call_may_be_captured(folders: Mapping[str, Path]) -> None:
    kernel = ptxflow.load(folders[NORM.definition])
    given = inputs(NORM.definition, **NORM.axes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*given)
    graph.replay()
    torch.testing.assert_close(out, kernel(*given))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_takes_it_whole(folders: Mapping[str, Path], mode: str) -> None:
    norm, gemm = (ptxflow.load(folders[r.definition]) for r in (NORM, GEMM))
    x, weight = inputs(NORM.definition, batch_size=16)
    b = torch.randn(4096, 4096, device="cuda").half()

    def program(x: torch.Tensor) -> torch.Tensor:
        return gemm(norm(x * 2, weight).half(), b) + 1

    compiled = torch.compile(program, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), program(x), rtol=1e-2, atol=1e-2)
    torch.library.opcheck(norm.op.make, (x, weight))


def test_sampling_draws_by_torchs_generator(gpu: GpuInfo, tmp_path: Path) -> None:
    definition = load("top_p_sampling_from_probs_v128256")
    (c,) = sample_workload(definition, {"batch_size": 8}, H200, count=1, seed=1).candidates
    kernel = ptxflow.load(
        library_of(definition, compile_kernel(c.problem, c.strategy, H200), tmp_path / "x")
    )
    given = inputs(definition.name, batch_size=8)
    torch.manual_seed(5)
    first, second = kernel(*given), kernel(*given)
    torch.manual_seed(5)
    assert torch.equal(kernel(*given), first)
    assert first.dtype == torch.int64 and not torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*given)

    def replays() -> list[list[int]]:
        torch.manual_seed(6)
        found = []
        for _ in range(4):
            graph.replay()
            found.append(out.tolist())
        return found

    drawn = replays()
    assert replays() == drawn and len({*map(tuple, drawn)}) > 1
    assert all(given[0].gather(1, torch.tensor(d, device="cuda")[:, None]).min() > 0 for d in drawn)


def hammer(kernel: Kernel, stream: torch.cuda.Stream, calls: int, wrong: list[str]) -> None:
    """Calls on one of a few inputs each, whose right outputs were computed before."""
    with torch.cuda.stream(stream):
        sets = [inputs(NORM.definition, batch_size=m) for m in (1, 3, 16)]
        peers = [kernel(*given).clone() for given in sets]
        for i in range(calls):
            out = kernel(*sets[i % 3])
            if i % 997 < 3 and not torch.equal(out, peers[i % 3]):
                wrong.append(f"call {i}")
            if i % 500 == 0:
                stream.synchronize()


@pytest.mark.slow
def test_a_million_calls_from_four_threads_on_two_streams(folders: Mapping[str, Path]) -> None:
    kernel = ptxflow.load(folders[NORM.definition])
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong: list[str] = []

    def run(calls: int) -> int:
        threads = [
            threading.Thread(target=hammer, args=(kernel, streams[i % 2], calls, wrong))
            for i in range(4)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = run(1000)
    assert run(250_000) <= before + (1 << 20)
    assert not wrong
