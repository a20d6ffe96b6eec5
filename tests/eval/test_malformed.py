"""Inputs that are not what they should be: every command says so in one line, without a traceback.

Valid files are changed at random, seeded: a value at any depth becomes another or goes, bytes are
cut, turned or replaced. What a command takes all the same is no malformed input and does not count.
"""

import copy
import json
import lzma
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ptxflow.command import reports
from ptxflow.compiler.device import H200
from ptxflow.compiler.library.manifest import MANIFEST, write_library
from ptxflow.env import surrogate_file
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import campaign, cluster, report
from ptxflow.eval.bench.candidates import sample_workload
from ptxflow.eval.bench.records import pack
from ptxflow.eval.sample import export, model_shapes
from ptxflow.eval.tune import knowledge
from ptxflow.gfn import checkpoint
from tests.builders import compiled, gemm_record, gemm_space
from tests.library.made import FILES, GEMM

EACH = 30  # malformed inputs of a kind
TRIES = 4000
POISON: Sequence[Any] = (
    None, -1, 0, 1.5, 10**30, True, "", "x", "M", [], {}, [None], [[]], {"x": 1}, float("nan"),
)  # fmt: skip
TEXTS = b"", b"null", b"[]", b"{}", b"3", b"[" * 100_000, b"\xff\xfe", b"\0" * 64, b'"x"'


def places(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are in JSON, at any depth."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*here, key)
        if isinstance(value, dict | list):
            yield from places(value, (*here, key))


def changed(data: Any, rng: random.Random) -> Any:
    """The value at one place is another, or gone."""
    data = copy.deepcopy(data)
    *path, last = rng.choice([*places(data)])
    at = data
    for key in path:
        at = at[key]
    if (value := rng.choice((*POISON, places))) is places:
        del at[last]
    else:
        at[last] = value
    return data


def turned(data: bytes, rng: random.Random) -> bytes:
    """Cut, with a byte turned or doubled, or something else."""
    at = rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 1 << 12))
    other = bytes([data[at] ^ 1 << rng.randrange(8)])
    return rng.choice((data[:at], data[at:], data[:at] + other + data[at + 1 :],
                       data[: at + 9] + data[at:], rng.choice(TEXTS)))  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """`data` is JSON, or bytes of what is not; `write` puts it where `main` reads it."""

    data: Any
    main: Callable[[list[str]], int]
    argv: Callable[[Path], list[str]]
    name: str = "given.json"
    wrap: Callable[[bytes], bytes] = lambda text: text

    def mutant(self, rng: random.Random) -> bytes:
        if isinstance(self.data, bytes):
            return turned(self.data, rng)
        if rng.random() < 0.7:
            return self.wrap(json.dumps(changed(self.data, rng)).encode() + b"\n")
        whole = json.dumps(self.data).encode() + b"\n"
        return (
            turned(self.wrap(whole), rng) if rng.random() < 0.5 else self.wrap(turned(whole, rng))
        )


def reading(read: Callable[[Path], object]) -> Callable[[list[str]], int]:
    """A command that reads a file."""

    @reports("read", cluster.WorkerError)
    def main(argv: Sequence[str] | None = None) -> int:
        read(Path((argv or [""])[0]))
        return 0

    return main


def message(path: Path) -> None:
    """What a GPU's worker says of a kernel."""
    asked: Future[Any] = Future()
    asked.set_result(path.read_bytes().decode(errors="replace"))
    worker = cluster.RemoteWorker(cluster.Cluster("tcp://here:1", client=object()))
    worker.bind("tcp://there:2", {})
    worker.cluster.submit = lambda *_: asked  # type: ignore[method-assign]
    cubin = path.with_name("k.cubin")
    cubin.write_bytes(b"")
    worker.run({"image": str(cubin)}, 1.0)


def compiled_message(path: Path) -> None:
    """What a compiler's worker says."""
    (found,) = cluster.read_outcomes(path.read_bytes().decode(errors="replace"), [TASK])
    if isinstance(found, Exception):
        raise cluster.WorkerError(str(found))


def base() -> bytes:
    """A knowledge base."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "k.sqlite")
        knowledge.Knowledge(path).merge([knowledge.Entry(**ENTRY)])
        return path.read_bytes()


SPACE = gemm_space(64, 128, 128)
TASK = (SPACE.problem, SPACE.strategy(int(SPACE.codes[0])), H200)
PLACE = load("rmsnorm_h128"), {"batch_size": 8}
STRATEGY = sample_workload(*PLACE, H200, count=1).candidates[0].strategy.to_json()
ENTRY: Any = {"state": "s", "move": "m", "device": "h200", "tried": 1, "helped": 1, "gain": 0.1,
              "squares": 0.01}  # fmt: skip
CHAMPION: Any = {"definition": "d", "axes": {"M": 64}, "device": "h200", "family": "gemm",
                 "choices": {"tile_m": 64}, "us": 10.5, "share": 0.5}  # fmt: skip
CONFIG = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}  # fmt: skip


def planned(*argv: str) -> Callable[[Path], list[str]]:
    def made(path: Path) -> list[str]:
        given = [str(path) if a == "FILE" else a for a in argv]
        return [*given, "--plan", "--device", "h200", "--out", str(path.with_name("none.jsonl"))]

    return made


DEFINITION = planned("--definition", "FILE", "--axes", "batch_size=8", "--samples", "1")
WORKLOAD = {"definition": "rmsnorm_h128", "axes": {"batch_size": [8]}, "samples": 2, "seed": 1,
            "fix": {}}  # fmt: skip
RECORD = gemm_record("k", 10.0)
MESSAGE = cluster.outcome_text([compiled(*TASK, image=b"x", techniques={})])


def itself(path: Path) -> list[str]:
    return [str(path)]


def weights(name: str) -> bytes:
    return (Path(__file__).parents[2] / "checkpoints" / f"{name}.safetensors").read_bytes()


KINDS = {
    "strategies": Kind([{"definition": PLACE[0].name, "axes": PLACE[1], **STRATEGY}],
                       campaign.main, planned("--strategies", "FILE")),
    "workloads": Kind([WORKLOAD], campaign.main, planned("--workloads", "FILE")),
    "definition": Kind(PLACE[0].to_json(), campaign.main, DEFINITION),
    "records": Kind(RECORD.to_json(), report.main, itself, "r.jsonl"),
    "packed": Kind(pack([RECORD])[0].to_json(), report.main, itself, "r.xz", lzma.compress),
    "agree": Kind(RECORD.to_json(), report.main, lambda p: ["--agree", str(p), str(p)], "r.jsonl"),
    "library": Kind(GEMM.to_json(), export.main, lambda p: [
        str(p.parent), str(p.parent / "hub"), "--license", "MIT"], MANIFEST),
    "knowledge": Kind(ENTRY, knowledge.main, lambda p: ["show", str(p)], "k.jsonl"),
    "champions": Kind(CHAMPION, knowledge.main, lambda p: ["show", str(p)], "k.jsonl"),
    "knowledge base": Kind(base(), knowledge.main, lambda p: ["show", str(p)], "k.sqlite"),
    "model": Kind(CONFIG, model_shapes.main, lambda p: [str(p), "--out", str(p.parent / "out")]),
    "surrogate": Kind(weights("surrogate-gdn_decode-h200"), reading(surrogate_file.read), itself),
    "checkpoint": Kind(weights("h200"), reading(checkpoint.read), itself),
    "gpu's message": Kind([{"status": "ok"}], reading(message), itself),
    "compiler's message": Kind(json.loads(MESSAGE), reading(compiled_message), itself),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_malformed_input_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, rng, refused = KINDS[name], random.Random(name), 0
    if name == "library":
        write_library(tmp_path / "lib", GEMM, FILES)
    path = tmp_path / ("lib" if name == "library" else "") / kind.name
    for _ in range(TRIES):
        path.write_bytes(given := kind.mutant(rng))
        capsys.readouterr()
        code = kind.main(kind.argv(path))
        said = capsys.readouterr().err.splitlines()
        assert code != 2 or len(said) == 1, (said, given[-500:])
        refused += code == 2
        if refused == EACH:
            return
    raise AssertionError(f"{refused} malformed inputs")
