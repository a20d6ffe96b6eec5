"""What several tests make up: problems, families, kernels, policies and records."""

import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ptxflow.compiler.backend.ptxas import Usage
from ptxflow.compiler.backend.sass import SassReport
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.family import Decision, Family, Problem, Rule, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch, PointerParam
from ptxflow.env.space import Space, StrategySpace, enumerate_space
from ptxflow.env.tasks.arguments import find_problem, find_space
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.candidates import Workload
from ptxflow.eval.bench.records import Record, RecordFile

if TYPE_CHECKING:
    from ptxflow.gfn.training import Trainer

ROOT = Path(__file__).resolve().parents[1]
Main = Callable[[Sequence[str]], int]
GEMM = family("gemm")
LAUNCH = Launch("kernel", ("1", "1", "1"), 128, (1, 1, 1), 0, (PointerParam("C"),))


def absent(*_: Any) -> Any:
    """In place of what a test must not ask for."""
    raise AssertionError("this must not be asked for")


def refused(main: Main, capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line on stderr of a command that ends with 2 and prints nothing else."""
    code: object
    try:
        code = main([str(a) for a in argv])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and not out and err.count("\n") == 1, err
    return err


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    """What Python prints where it is started in the root of the repository."""
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


def toy_family(
    name: str, decisions: Sequence[Decision], rules: Sequence[Rule], **given: Any
) -> Family:
    """A family of decisions and rules, and of what else is given."""
    needed = "problem", "resources", "demand", "build", "trips", "launch", "trial"
    functions: dict[str, Any] = dict.fromkeys(needed, absent) | given
    return Family(name, (name,), tuple(decisions), tuple(rules), **functions)


def gemm_problem(m: int, n: int, k: int, dtype: str = "float16") -> Problem:
    axes = (("M", m), ("N", n), ("K", k))
    work = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
    return Problem("gemm", f"gemm_n{n}_k{k}", axes, dtype, *work)


@functools.lru_cache(4)
def gemm_space(m: int, n: int, k: int, device: Device = H200) -> Space:
    return enumerate_space(GEMM, gemm_problem(m, n, k), device)


def space_at(name: str, axes: dict[str, int], device: Device = H200) -> Space:
    """The space of a definition at axes."""
    return find_space(*find_problem(load(name), axes), device)


def compiled(
    p: Problem, s: Strategy, device: Device, ptx: str = "// ptx", image: bytes = b"cubin",
    techniques: dict[str, int] | None = None, checks: tuple[str, ...] = (),
) -> CompiledKernel:  # fmt: skip
    """A kernel that nobody compiled."""
    usage, sass = Usage(168, 0, 0, 0, 0, 1, 0), SassReport(techniques or {}, (), ())
    return CompiledKernel(p, s, device, LAUNCH, ptx, image, usage, sass, checks)


def untrained(path: Path, space: StrategySpace, about: dict[str, Any] | None = None) -> Path:
    """The checkpoint of a policy that nobody trained."""
    from ptxflow.gfn.checkpoint import Checkpoint, write
    from ptxflow.gfn.network import FamilyConfig, NetworkConfig, PolicyNetwork
    from ptxflow.gfn.walks import family_shape

    shape = family_shape(space)
    count = len(shape.features)
    config = NetworkConfig((FamilyConfig(shape, (0.0,) * count, (1.0,) * count, 16, 1),))
    tensors = {f"policy.{k}": v for k, v in PolicyNetwork(config).state_dict().items()}
    write(path, Checkpoint(config, about or {}, tensors))
    return path


def record(
    name: str, axes: dict[str, int], strategy: Strategy, us: float, **changes: Any
) -> Record:
    """Of a right kernel on an H200 that takes so many microseconds."""
    fields = {"latency_us": {"median": us}, **changes}
    return Record(name, axes, strategy.to_json(), strategy.key, "h200", "ok", **fields)


def gemm_record(key: str, us: float, m: int = 6, status: str = "ok", **changes: Any) -> Record:
    """A kernel of gemm_n128_k2048 beside a library that takes 8 us."""
    return Record(
        "gemm_n128_k2048", {"M": m}, {"family": "gemm", "choices": {"a": key}}, key, "h200", status,
        correct=status == "ok", latency_us={"median": us, "q1": us, "q3": us, "samples": 7},
        peers={"torch.mm": 8.0}, ratio=8.0 / us, **changes,
    )  # fmt: skip


def by_key(strategy: Strategy) -> float:
    """Microseconds that differ from strategy to strategy."""
    return 5.0 + int(strategy.key[:2], 16) / 100


def played(us: Callable[[Strategy], float]) -> Callable[[Sequence[Workload], Path], None]:
    """In place of `live_reward.on_gpus`: every kernel is right, and takes the microseconds told."""

    def play(workloads: Sequence[Workload], path: Path) -> None:
        with RecordFile(path) as file:
            for c in (c for w in workloads for c in w.candidates):
                file.append(record(c.definition.name, c.axes, c.strategy, us(c.strategy)))

    return play


def away_from_uniform(trainer: "Trainer") -> "Trainer":
    """The trainer, of a network whose outputs are drawn at random."""
    import torch

    generator = torch.manual_seed(0)
    for shape in trainer.network.config.families:
        torch.nn.init.normal_(trainer.network.of(shape.name).head, std=0.5, generator=generator)
    return trainer
