"""A Solution is one JSON file that runs by itself and asks the driver for what the runtime does."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.util
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from ptxflow.compiler.backend.runtime import Driver, LoadedKernel
from ptxflow.compiler.device import H200
from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    Workspace,
)
from ptxflow.env.tasks.definition import Definition, load, parse
from ptxflow.eval.bench.session import unpack
from ptxflow.eval.sample.solution import (
    SolutionError,
    main,
    main_source,
    read_solution,
    solution,
)
from tests.builders import refused
from tests.families.moe import HOPPER, MOE, sized
from tests.libcuda import Cuda

DEFINITION = load("gemm_n128_k2048")
LAUNCH = Launch(
    entry="ptxflow_gemm",
    grid=("-(-M // 128)", "min(N // 64, 132)", "1"),
    block=384,
    cluster=(2, 1, 1),
    smem_bytes=200_000,
    params=(
        TensorMapParam("A", "float16", ("K", "M"), ("2 * K",), (64, 128), 128),
        TensorMapParam("B", "float16", ("K", "N"), ("K * 2",), (64, 64), 64, 256),
        PointerParam("C"),
        ScalarParam("m", "M"),
    ),
)


class Recorder(Cuda):
    """Remembers what tensor maps and launches it was asked for."""

    def cuTensorMapEncodeTiled(self, start: Any, *args: Any) -> int:
        assert start.value % 128 == 0
        self.asked.append([self._plain(a) for a in args])
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        words = ctypes.string_at(ctypes.addressof(config._obj), 32)  # grid, block, shared memory
        attribute = ctypes.c_uint64.from_buffer_copy(
            ctypes.string_at(ctypes.addressof(config._obj) + 40, 8)
        ).value
        scalars = [ctypes.string_at(params[i], n) for i, n in ((2, 8), (3, 4))]
        self.asked.append([words[:28], ctypes.string_at(attribute, 20), *scalars])
        return 0

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, ctypes.Array):
            return list(value)
        return getattr(value, "value", value)


def imported(folder: Path, data: dict[str, Any]) -> Any:
    spec = importlib.util.spec_from_file_location("solution_main", unpack(data, folder))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors_of(definition: Definition, axes: dict[str, int]) -> dict[str, torch.Tensor]:
    """Inputs and outputs that nobody wrote."""
    return {
        name: torch.empty([axes[a] for a in t.shape], dtype=getattr(torch, t.dtype))
        for name, t in {**definition.inputs, **definition.outputs}.items()
        if t.shape is not None
    }


@pytest.fixture
def data() -> dict[str, Any]:
    return solution(DEFINITION, H200, LAUNCH, "// ptx text", "k1", "a test")


def test_it_imports_nothing_of_ours(data: dict[str, Any]) -> None:
    tree = ast.parse(data["sources"][0]["content"])
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    found |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert found == {"ctypes", "pathlib", "typing", "torch"}


def test_it_asks_the_driver_for_what_the_runtime_does(data: dict[str, Any], tmp_path: Path) -> None:
    m, n, k = 300, 128, 2048
    a, b, c = (torch.empty(s, dtype=torch.float16) for s in ((m, k), (n, k), (m, n)))
    module = imported(tmp_path, data)
    module.cuda = theirs = Recorder()
    config, addresses, _ = module.prepare(module.STEPS[0], *module.geometry(a, b, c)[1][0])
    module.driver("cuLaunchKernelEx", ctypes.byref(config), None, addresses, None)

    ours = Recorder()
    kernel = LoadedKernel(LAUNCH, b"cubin", Driver(ours))
    tensors = {"A": a.data_ptr(), "B": b.data_ptr(), "C": c.data_ptr()}
    kernel.bind(tensors, {"M": m, "N": n, "K": k})()
    assert len(ours.asked) == 3
    assert theirs.asked == ours.asked


DRAWING = Launch(
    entry="ptxflow_decode",
    grid=("batch_size", "1", "1"),
    block=32,
    cluster=(1, 1, 1),
    smem_bytes=0,
    params=(
        PointerParam("q"),
        PointerParam("state"),
        PresentParam("state"),
        InputParam("scale", "float32"),
        *(RandomParam(word) for word in range(4)),
    ),
)
WIDTHS = (8, 8, 4, 4, 4, 4, 4, 4)


class Words(Cuda):
    """Remembers the parameters of each launch."""

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        at = [ctypes.string_at(params[i], n) for i, n in enumerate(WIDTHS)]
        self.asked.append([int.from_bytes(word, "little") for word in at])
        return 0


class Generator:
    """torch's generator of a device, as far as a Solution asks it."""

    def __init__(self) -> None:
        self.offset = 8

    def initial_seed(self) -> int:
        return 0x1_0000_0003

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize(("scale", "given"), [(0.5, True), (None, False)])
def test_numbers_optional_tensors_and_randomness(
    scale: float | None, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runtime passes for them, and a generator that moves on at every launch."""
    definition = load("gdn_decode_qk16_v32_d128_k_last")
    module = imported(tmp_path, solution(definition, H200, DRAWING, "//", "k1", "a test"))
    axes = definition.bind({"batch_size": 3})
    tensors = tensors_of(definition, axes)
    places: dict[str, int | None] = {name: t.data_ptr() for name, t in tensors.items()}
    places |= {} if given else {"state": None}
    named = {**tensors, "scale": scale, "state": tensors["state"] if given else None}
    arguments = [named[name] for name in (*definition.inputs, *definition.outputs)]
    module.cuda = theirs = Words()
    module.functions[0] = None
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    config, addresses, _held = module.prepare(module.STEPS[0], *module.geometry(*arguments)[1][0])
    for _ in range(2):
        module.draw(torch.device("cuda", 0))
        module.driver("cuLaunchKernelEx", ctypes.byref(config), None, addresses, None)
    assert generator.offset == 16

    ours = Words()
    kernel = LoadedKernel(DRAWING, b"cubin", Driver(ours))
    for offset in (8, 12):
        kernel.bind(places, axes, Arguments({"scale": scale}, 0x1_0000_0003, offset))()
    assert theirs.asked == ours.asked
    assert ours.asked[1][2:] == [given, 0x3F000000 if scale else 0, 3, 1, 12, 0]
    assert 'state is None or expect("state"' in (tmp_path / "main.py").read_text()


def test_an_optional_tensor_that_is_missing(tmp_path: Path) -> None:
    """A prefill without states: how many sequences there are follows from the other inputs."""
    definition = load("gdn_prefill_qk16_v32_d128_k_last")
    params = (PointerParam("state"), PresentParam("state"), ScalarParam("count", "num_seqs"))
    launch = Launch("prefill", ("num_seqs * 4", "1", "1"), 32, (1, 1, 1), 0, params)
    module = imported(tmp_path, solution(definition, H200, launch, "//", "k1", "a test"))
    axes = definition.bind({"total_seq_len": 9, "num_seqs": 3, "len_cu_seqlens": 4})
    tensors = tensors_of(definition, axes) | {"scale": torch.empty(())}
    ((grid, values),) = module.geometry(**tensors | {"state": None})[1]
    assert grid == (12, 1, 1) and [held.value for _, held in values] == [0, 0, 3]
    for name in ("q", "cu_seqlens"):
        with pytest.raises(ValueError, match=f"{name} must be given"):
            module.run(**{n: tensors[n] for n in definition.inputs} | {name: None})


DECODE = Launch(
    entry="chunks",
    grid=("num_kv_indices // 64 + batch_size", "1", "1"),
    block=128,
    cluster=(1, 1, 1),
    smem_bytes=50_000,
    params=(PointerParam("q"), PointerParam("sums")),
    then=(
        Launch(
            entry="sums",
            grid=("batch_size", "1", "1"),
            block=64,
            cluster=(1, 1, 1),
            smem_bytes=0,
            params=(PointerParam("sums"), PointerParam("output")),
            dependent=True,
        ),
    ),
    workspace=(Workspace("sums", "batch_size * 512"), Workspace("stats", "batch_size * 32")),
)


class Steps(Cuda):
    """Remembers grid, block, attributes and two pointers of each launch."""

    def cuMemAlloc_v2(self, out: Any, size: Any) -> int:
        out._obj.value = 0x7000
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        raw = ctypes.string_at(ctypes.addressof(config._obj), 52)
        count = int.from_bytes(raw[48:52], "little")
        attribute = ctypes.string_at(int.from_bytes(raw[40:48], "little"), 12) if count else b""
        pointers = [ctypes.c_uint64.from_address(params[i]).value for i in range(2)]
        self.asked.append([raw[:28], attribute, pointers])
        return 0


def launched(
    module: Any, arguments: list[Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], list[torch.Tensor]]:
    """What a Solution's launcher asks of the driver, and what it takes as workspace.

    Every workspace is alive at each launch, and none is behind the last.
    """
    taken, alive = list[Any](), list[int]()
    empty = torch.empty

    def take(*shape: Any, **given: Any) -> torch.Tensor:
        tensor = empty(*shape, **given)
        taken.append((weakref.ref(tensor), tensor.data_ptr(), tensor.numel()))
        return tensor

    class Watching(Steps):
        def cuLaunchKernelEx(self, *args: Any) -> int:
            alive.append(sum(there() is not None for there, *_ in taken))
            return super().cuLaunchKernelEx(*args)

    module.cuda, module.functions[None] = Watching(), [None] * len(module.STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", take)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=None))
        module.launch(module.geometry, tuple(arguments))
    assert alive == [len(taken)] * len(module.STEPS)
    assert all(there() is None for there, *_ in taken)
    return module.cuda.asked, [rest for _, *rest in taken]


def test_a_program_is_one_call_over_its_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches that the runtime makes, but for where the workspace is."""
    definition = load("gqa_paged_decode_h32_kv8_d128_ps1")
    module = imported(tmp_path, solution(definition, H200, DECODE, "//", "k1", "a test"))
    axes = definition.bind(
        {"batch_size": 3, "len_indptr": 4, "num_kv_indices": 200, "num_pages": 9}
    )
    tensors = tensors_of(definition, axes)
    arguments = [tensors.get(n, 0.5) for n in (*definition.inputs, *definition.outputs)]
    asked, taken = launched(module, arguments, monkeypatch)

    ours = Steps()
    places = {name: t.data_ptr() for name, t in tensors.items()}
    LoadedKernel(DECODE, b"cubin", Driver(ours)).bind(places, axes)()
    assert len(ours.asked) == len(asked) == 2
    for mine, their in zip(ours.asked, asked, strict=True):
        assert mine[:2] == their[:2]
    assert ours.asked[1][1] == bytes([6, 0, 0, 0] + [0] * 4 + [1, 0, 0, 0])
    (q, sums), (sums_again, output) = (pointers for *_, pointers in asked)
    assert q == tensors["q"].data_ptr() and output == tensors["output"].data_ptr()
    assert [[sums, 3 * 512], [ANY, 3 * 32]] == taken and sums_again == sums
    # a second call takes its own
    asked, taken = launched(module, arguments, monkeypatch)
    assert [pointers[1 - i] for i, (*_, pointers) in enumerate(asked)] == [taken[0][0]] * 2


class Maps(Cuda):
    """Remembers type, address, dims and box of each tensor map."""

    def cuTensorMapEncodeTiled(
        self, start: Any, kind: int, rank: Any, address: Any, *rest: Any
    ) -> int:
        dims, _, box, *_ = rest
        self.asked.append((kind, address.value, tuple(dims), tuple(box)))
        return 0


def test_a_workspace_is_mapped_where_it_is_taken(tmp_path: Path) -> None:
    """Anew when it comes from another place."""
    given, s = sized(local=3, hidden=256, inner=128), HOPPER["columns"]
    launch = MOE.launch(MOE.problem(given.to_json(), {"seq_len": 5}), s, H200)
    module = imported(tmp_path, solution(given, H200, launch, "//", "k1", "a test"))
    module.cuda = maps = Maps()
    tensors = tensors_of(given, given.bind({"seq_len": 5}))
    arguments = [tensors.get(n, 2) for n in (*given.inputs, *given.outputs)]
    spaces, places = module.geometry(*arguments)
    assert [len(grid) for grid, _ in places] == [3] * 5
    assert {address for _, address, *_ in maps.asked} == {
        tensors[f"gemm{i}_weights"].data_ptr() for i in (1, 2)
    }
    (inner,) = (space for space in spaces if space.maps)
    held = [inner.take(torch.device("cpu")) for _ in range(2)]
    rows = inner.size // 128
    expected = [(0, t.data_ptr(), (128, rows), (128, s.tile_t)) for t in held]
    assert maps.asked[2:] == expected
    where = held.pop().data_ptr()
    again = inner.take(torch.device("cpu"))
    assert len(maps.asked) == 4 + (again.data_ptr() != where)


def test_a_workspace_that_is_named_like_a_tensor_is_refused() -> None:
    definition = load("gqa_paged_decode_h32_kv8_d128_ps1")
    launch = replace(DECODE, workspace=(Workspace("output", "4"),))
    with pytest.raises(SolutionError, match="'output' names more than one"):
        main_source(definition, H200, launch, "k1")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (((8, 1024), torch.float16), ((128, 2048), torch.float16), r"A must be .*\(8, 2048\)"),
        (((8, 2048), torch.float32), ((128, 2048), torch.float16), "A must be torch.float16"),
        (((2048,), torch.float16), ((128, 2048), torch.float16), "A must have 2 dimensions"),
        (((8, 2048), torch.float16), ((128, 2048), torch.float16), "A must be on a CUDA device"),
    ],
)
def test_wrong_tensors_are_refused(
    data: dict[str, Any], tmp_path: Path, a: Any, b: Any, message: str
) -> None:
    module = imported(tmp_path, data)
    with pytest.raises(ValueError, match=message):
        module.run(torch.empty(a[0], dtype=a[1]), torch.empty(b[0], dtype=b[1]))


def test_the_file_reads_back_and_names_what_is_wrong(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(data))
    assert read_solution(path) == data
    for change, message in (
        ({"spec": data["spec"] | {"language": "cuda"}}, "only Solutions in python"),
        ({"spec": data["spec"] | {"entry_point": "x.py::run"}}, "no source file 'x.py'"),
        ({"sources": [{"path": "../main.py", "content": "x"}]}, "no source file|leads out"),
        ({"sources": data["sources"] + [{"path": "/x", "content": "x"}]}, "leads out"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(SolutionError, match=message):
            read_solution(path)
    path.write_text("[]")
    with pytest.raises(SolutionError, match="needs name, definition"):
        read_solution(path)


def test_names_that_python_cannot_have_are_refused() -> None:
    raw = DEFINITION.to_json()
    raw["axes"]["class"] = raw["axes"].pop("M")
    raw["inputs"]["A"]["shape"] = ["class", "K"]
    raw["outputs"]["C"]["shape"] = ["class", "N"]
    with pytest.raises(SolutionError, match="'class' cannot be a name"):
        main_source(parse(raw), H200, LAUNCH, "k1")


def test_check_without_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "none.json" in refused(main, capsys, "check", tmp_path / "none.json")


@pytest.mark.usefixtures("driverless")
def test_check_without_a_gpu_is_one_line(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(data))
    assert "libcuda.so.1" in refused(main, capsys, "check", path)


def test_the_schema_of_flashinfer_bench_takes_it(data: dict[str, Any]) -> None:
    package = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench not installed")
    made = package.Solution.model_validate(data)
    assert made.get_entry_symbol() == "run" and "flashinfer_bench" in sys.modules
