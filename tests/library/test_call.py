"""A loaded library, called on tensors: right values by both launchers, and one line for bad ones.

Kernels are Python functions behind a driver that stands in for CUDA's.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ptxflow.compiler.backend.runtime import LaunchError
from ptxflow.compiler.library.call import Kernel
from ptxflow.compiler.library.device import Cuda
from ptxflow.compiler.library.manifest import LibraryError
from ptxflow.compiler.library.native import NoLauncher, build
from ptxflow.compiler.library.signature import ArgumentError
from tests.builders import python
from tests.library import made
from tests.library.fake import CONTEXT, FakeLibrary
from tests.library.made import GEMM, loaded, one_member


def has_native() -> bool:
    try:
        build()
    except NoLauncher:
        return False
    return True


LAUNCHERS = ["ctypes", *(["native"] if has_native() else [])]
Loaded = tuple[Kernel, FakeLibrary]


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gemm(tmp_path: Path, launcher: str) -> Loaded:
    return loaded(tmp_path / "gemm", GEMM, launcher)


@pytest.fixture
def affine(tmp_path: Path, launcher: str) -> Loaded:
    return loaded(
        tmp_path / "affine", one_member(made.AFFINE, made.AFFINE_LAUNCH, M=(1, 64)), launcher
    )


def operands(m: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, 2048).half(), torch.randn(128, 2048).half()


def close(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(c, (a.float() @ b.float().T).half(), rtol=1e-3, atol=0.1)


def test_a_product_at_many_sizes_twice_with_fresh_pointers(gemm: Loaded) -> None:
    kernel, library = gemm
    for m in (1, 64, 65, 1, 64, 65, 300):
        a, b = operands(m)
        close(kernel(a, b), a, b)
    c = torch.empty(5, 128, dtype=torch.float16)
    a, b = operands()
    assert kernel(a, B=b, out=c) is c and kernel(A=a, B=b, out=(c,)) is c
    close(c, a, b)
    close(kernel(a, b, out={"C": c}), a, b)
    assert library.launches == 10 and library.current == [CONTEXT]


@pytest.mark.parametrize("opaque", [False, True])
def test_maps_take_wide_rows_and_keep_no_address(
    tmp_path: Path, launcher: str, opaque: bool
) -> None:
    kernel, library = loaded(tmp_path / "x", GEMM, launcher, opaque)
    for _ in range(3):
        whole, b = torch.randn(7, 4096).half(), torch.randn(128, 2048).half()
        for a in (whole[:, :2048], whole[:, 2048:], whole[::2, 8:2056]):
            close(kernel(a, b), a, b)
    assert (library.replaced > 0) is opaque


def test_two_kernels_share_a_workspace_and_scalars_go_by_value(affine: Loaded) -> None:
    kernel, library = affine
    marks = torch.zeros(4, dtype=torch.int32)
    for scale, rounds in ((2.0, 3), (-0.5, -(2**31)), (4, 5)):
        x, state = torch.randn(3, 8), torch.randn(3, 8)
        y, z = kernel(x, marks, state, scale, rounds)
        torch.testing.assert_close(y, x * scale + state)
        assert z.tolist() == [rounds] * 3
        y, z = kernel(x, marks, scale=scale, rounds=rounds)
        torch.testing.assert_close(y, x * scale)
    out = torch.empty(3, 8), torch.empty(3, dtype=torch.int32)
    for _ in range(2):
        given = kernel(x, marks, None, 2.0, 1, out=out)
        assert given[0] is out[0] and given[1] is out[1]
    torch.testing.assert_close(out[0], x * 2)
    assert library.launches == 16


def test_parameters_are_taken_where_no_gradient_is_wanted(gemm: Loaded) -> None:
    kernel, _ = gemm
    a, b = operands()
    weight = torch.nn.Parameter(b)
    with torch.no_grad():
        close(kernel(a, weight), a, b)
        close(kernel(a, weight), a, b)
    with pytest.raises(ArgumentError, match="B requires grad"):
        kernel(a, weight)


def test_a_known_call_is_refused_for_what_its_plan_does_not_know(
    gemm: Loaded, affine: Loaded
) -> None:
    b, room = half(128, 2048)(), half(5 * 2048 + 5 * 128)()
    kernel, library = gemm
    apart, within = (room[i : i + 5 * 128].view(5, 128) for i in (5 * 2048, 5 * 2048 - 8))
    for out in (apart, apart, within):
        given = room[: 5 * 2048].view(5, 2048)
        if out is within:
            with pytest.raises(ArgumentError, match="C overlaps A"):
                kernel(given, b, out=out)
        else:
            assert kernel(given, b, out=out) is out
    assert library.launches == 2
    kernel, library = affine
    x, marks = torch.randn(3, 8), torch.zeros(4, dtype=torch.int32)
    kernel(x, marks, None, 2.0, 3)
    with pytest.raises(ArgumentError, match="rounds must fit 32 bits"):
        kernel(x, marks, None, 2.0, 2**31)
    assert kernel(x, marks, None, 2**40, 3)[0].shape == x.shape  # a float may be any number
    assert library.launches == 4


def test_random_words_move_on_and_a_capture_is_refused(tmp_path: Path, launcher: str) -> None:
    kernel, _ = loaded(tmp_path / "x", one_member(made.DRAW, made.DRAW_LAUNCH), launcher)
    assert [kernel(torch.zeros(4)).tolist() for _ in range(2)] == [[7, 0, 0, 0], [7, 0, 4, 0]]
    kernel._device.in_capture = True  # type: ignore[attr-defined]
    with pytest.raises(LaunchError, match="repeat them at every replay"):
        kernel(torch.zeros(4))


def test_a_capture_draws_from_a_state_on_the_device(tmp_path: Path, launcher: str) -> None:
    kernel, _ = loaded(tmp_path / "x", one_member(made.DRAW, made.STATE_LAUNCH), launcher)
    assert kernel(torch.zeros(4)).tolist() == [7, 0, 0, 0]
    kernel._device.in_capture = True  # type: ignore[attr-defined]
    assert kernel(torch.zeros(4)).tolist() == [21, 0, 8, 1]
    kernel._device.in_capture = False  # type: ignore[attr-defined]
    assert kernel(torch.zeros(4)).tolist() == [7, 0, 4, 0]


def a_and(b: Callable[[], Any], **out: Any) -> Callable[[Kernel], Any]:
    return lambda k: k(operands()[0], b(), **{n: f() for n, f in out.items()})


def half(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(*shape, dtype=torch.float16)


def shared(columns: int) -> Callable[[Kernel], Any]:
    def call(kernel: Kernel) -> Any:
        room = torch.zeros(5, 2048 + columns, dtype=torch.float16)
        flat = room.view(-1)
        return kernel(room[:, :2048], half(128, 2048)(), out=flat[: 5 * 128].view(5, 128))

    return call


BAD: list[tuple[Callable[[Kernel], Any], str]] = [
    (a_and(lambda: torch.zeros(128, 2048)), "B must be torch.float16, not torch.float32"),
    (a_and(half(2048)), "B must have 2 dimensions, not 1"),
    (a_and(half(64, 2048)), "B has N=64 in its shape (64, 2048), and N is 128 by definition"),
    (a_and(lambda: None), "B must be a tensor, not None"),
    (a_and(lambda: 3), "B must be a tensor, not a int"),
    (a_and(lambda: half(128, 2048)().to("meta")), "B must be on a cpu device, not meta"),
    (a_and(lambda: half(128, 2048)().to_sparse()), "B must be dense, not torch.sparse_coo"),
    (a_and(lambda: half(2048, 128)().T), "its last dimension must be dense"),
    (a_and(lambda: half(128, 2052)()[:, :2048]), "4104 bytes is no positive multiple of 16"),
    (a_and(lambda: half(1, 2048)().expand(128, 2048)), "0 bytes is no positive multiple"),
    (a_and(lambda: half(128 * 2048 + 1)()[1:].view(128, 2048)), "B begins 2 bytes after"),
    (a_and(lambda: half(128, 2048)().requires_grad_()), "B requires grad"),
    (lambda k: k(half(0, 2048)(), half(128, 2048)()), "A is empty: (0, 2048)"),
    (lambda k: k(half(4097, 2048)(), half(128, 2048)()), "M=4097, outside 1 to 4096"),
    (a_and(half(128, 2048), out=half(4, 128)), "C has M=4 in its shape (4, 128), and M is 5 in A"),
    (a_and(half(128, 2048), out=half(128, 5)), "C has M=128"),
    (a_and(half(128, 2048), out=lambda: half(5, 256)()[:, :128]), "C must be contiguous"),
    (a_and(half(128, 2048), out=lambda: 5), "C must be a tensor, not a int"),
    (shared(0), "out C overlaps A in memory"),
    (shared(64), "out C overlaps A in memory"),
    (lambda k: k(operands()[0]), "needs B"),
    (lambda k: k(*operands(), 1, 2), "out must be C: 1 in all"),
    (lambda k: k(*operands(), *operands(), B=1), "takes 2 inputs (A, B), not 4"),
    (lambda k: k(operands()[0], out=half(5, 128)()), "needs B"),
    (lambda k: k(*operands(), D=1), "has no input 'D'; there are A, B"),
    (lambda k: k(*operands(), A=1), "was given A twice"),
]


@pytest.mark.parametrize(("call", "line"), BAD, ids=[line for _, line in BAD])
def test_a_bad_call_is_one_line_and_launches_nothing(
    gemm: Loaded, call: Callable[[Kernel], Any], line: str
) -> None:
    kernel, library = gemm
    a, b = operands()
    kernel(a, b)  # its shapes are known: the fast path must not take what is bad
    kernel(a, b, out=torch.empty(5, 128, dtype=torch.float16))
    before = library.launches
    for _ in range(2):
        with pytest.raises((ArgumentError, LibraryError)) as error:
            call(kernel)
        text = str(error.value)
        assert text.startswith("gemm_n128_k2048: ") and line in text and "\n" not in text
    assert library.launches == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"scale": torch.ones(())}, "scale must be a Python float, not a tensor on cpu"),
        ({"scale": None}, "scale must be a Python float, not None"),
        ({"scale": True}, "scale must be a Python float, not a bool"),
        ({"rounds": 1.5}, "rounds must be a Python int, not a float"),
        ({"rounds": 2**31}, "rounds must fit 32 bits"),
        ({"marks": torch.zeros(3, dtype=torch.int32)}, "M1 must be M + 1 (M1=3, M=3)"),
        ({"x": torch.zeros(3, 16)[:, :8]}, "x must be contiguous"),
    ],
)
def test_scalars_and_equalities_are_checked(
    affine: Loaded, arguments: dict[str, Any], line: str
) -> None:
    kernel, library = affine
    good = {"x": torch.zeros(3, 8), "marks": torch.zeros(4, dtype=torch.int32), "state": None,
            "scale": 1.0, "rounds": 1}  # fmt: skip
    kernel(**good)
    for _ in range(2):
        with pytest.raises(ArgumentError) as error:
            kernel(**{**good, **arguments})
        assert line in str(error.value)
    assert library.launches == 2


def test_a_general_member_serves_sizes_outside(tmp_path: Path, launcher: str) -> None:
    kernel, _ = loaded(tmp_path / "x", replace(GEMM, general=1), launcher)
    a, b = operands(5000)
    close(kernel(a, b), a, b)


def test_a_failed_launch_has_its_name(gemm: Loaded) -> None:
    kernel, library = gemm
    a, b = operands()
    kernel(a, b)
    library.failing = 719
    with pytest.raises(LaunchError, match="cuLaunchKernelEx: CUDA_ERROR_LAUNCH_FAILED: gemm_16"):
        kernel(a, b)


def test_another_context_is_set_for_the_launch_alone(gemm: Loaded) -> None:
    kernel, library = gemm
    a, b = operands()
    kernel(a, b)
    library.current, pushes = [0xBAD], library.pushes
    close(kernel(a, b), a, b)
    assert library.current == [0xBAD] and library.pushes == pushes + 1


def test_an_image_that_does_not_fit_is_translated_with_a_warning(tmp_path: Path) -> None:
    kernel, library = loaded(tmp_path / "x", GEMM)
    library.bad_images = (b"cubin of b",)
    with pytest.warns(UserWarning, match="NO_BINARY_FOR_GPU"):
        kernel(*operands())
    assert library.loaded == [b"cubin of a", b"cubin of b", b"ptx of b"]


def test_threads_do_not_mix_their_pointers(gemm: Loaded) -> None:
    kernel, _ = gemm
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        b = torch.randn(128, 2048).half()
        try:
            for i in range(30):
                a = torch.full((1 + (seed + i) % 3, 2048), float(seed)).half()
                close(kernel(a, b), a, b)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_more_shapes_than_are_kept_and_nothing_leaks(
    tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptxflow.compiler.library.call.MAX_PLANS", 4)
    kernel, _ = loaded(tmp_path / "x", one_member(made.AFFINE, made.AFFINE_LAUNCH), launcher)

    def some() -> None:
        for m in (*range(1, 12), 3, 11):
            x, marks = torch.randn(m, 8), torch.zeros(m + 1, dtype=torch.int32)
            y, _ = kernel(x, marks, None, 2.0, 1)
            torch.testing.assert_close(y, x * 2)

    some()
    gc.collect()
    before = len(gc.get_objects())
    some()
    gc.collect()
    assert len(gc.get_objects()) <= before + 20
    assert len(kernel._plans) <= 4


def test_a_library_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Cuda.__new__(Cuda)
    gpus = [("NVIDIA B200", (10, 0)), ("NVIDIA H100 80GB HBM3", (9, 0))]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: gpus[i][0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: gpus[i][1])
    device.check_any(made.H200)
    with pytest.raises(LibraryError, match=r"h200 \(.*9\.0\), and device 0 is NVIDIA B200 \(10\.0"):
        device.check(made.H200, 0)
    with pytest.warns(UserWarning, match="chosen for h200, and this is NVIDIA H100"):
        device.check(made.H200, 1)
    gpus.pop()
    with pytest.raises(LibraryError, match="device 0 is NVIDIA B200"):
        device.check_any(made.H200)
    gpus.pop()
    with pytest.raises(LibraryError, match="torch sees no GPU"):
        device.check_any(made.H200)


def test_load_is_there_when_asked_for() -> None:
    import ptxflow

    assert callable(ptxflow.load)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        ptxflow.lode  # noqa: B018


@pytest.mark.slow
def test_loading_imports_little() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import ptxflow; ptxflow.load\n"
        "print(*{m.split('.')[0] for m in set(sys.modules) - before} - {'ptxflow'})"
    )
    done = python("-c", program)
    assert not set(done.stdout.split()) & {"gfn", "matplotlib", "scipy", "tqdm", "cuda"}, done
    assert not done.stderr
