"""The cubin cache: hits, keys, damage, directories that cannot be written."""

import os
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Op, Statement, digest, edit, walk
from ptxflow.compiler.processes import Processes
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.kept import main

PTX = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
.reqntid 128
{
.reg .b64 %rd<2>;
.reg .b32 %r<2>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
st.global.u32 [%rd1], %r1;
ret;
}
"""


class Counted:
    """Counts the real assemblies that happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        real = ptxas.assemble

        def assemble(ptx: str, arch: str, *, timeout: float = 60.0) -> ptxas.Assembly:
            self.calls += 1
            return real(ptx, arch, timeout=timeout)

        monkeypatch.setattr(ptxas, "assemble", assemble)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_second_time_comes_from_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    first, second = cache.assemble(PTX, "sm_90a"), cache.assemble(PTX, "sm_90a")
    assert first == second and counted.calls == 1
    assert len(entries(folder)) == 1


def test_text_target_version_and_flags_are_in_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    cache.assemble(PTX, "sm_90a")
    cache.assemble(PTX + "\n", "sm_90a")
    monkeypatch.setattr(ptxas, "FLAGS", (*ptxas.FLAGS, "-O3"))
    cache.assemble(PTX, "sm_90a")
    monkeypatch.setattr(ptxas, "version", lambda: "13.0.89")
    cache.assemble(PTX, "sm_90a")
    assert counted.calls == 4 and len(entries(folder)) == 4


def test_key_separates_its_parts() -> None:
    assert cache.key("ab", "c") != cache.key("a", "bc")
    assert cache.key("a", b"b") == cache.key("a", "b")


@pytest.mark.parametrize("cut", ["flip", "truncate", "empty"])
def test_damage_is_seen_and_made_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    counted = Counted(monkeypatch)
    good = cache.assemble(PTX, "sm_90a")
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes({"flip": bytes(data), "truncate": bytes(data[:-50]), "empty": b""}[cut])
    assert cache.assemble(PTX, "sm_90a").cubin == good.cubin
    assert counted.calls == 2
    cache.assemble(PTX, "sm_90a")
    assert counted.calls == 2


def test_refusals_are_not_kept(folder: Path) -> None:
    with pytest.raises(ptxas.PtxasError):
        cache.assemble(PTX.replace("mov", "movx"), "sm_90a")
    assert entries(folder) == []


def test_a_directory_that_cannot_be_written_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv(cache.VARIABLE, str(blocked / "cache"))
    counted = Counted(monkeypatch)
    with pytest.warns(RuntimeWarning, match=cache.VARIABLE):
        cache.assemble(PTX, "sm_90a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.assemble(PTX, "sm_90a").cubin.startswith(b"\x7fELF")
    assert counted.calls == 2


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    kept = cache.Store(tmp_path)
    with pytest.warns(RuntimeWarning, match="No space left"):
        kept.put("abcd", b"payload")
    assert entries(tmp_path) == [] and kept.get("abcd") is None


def a_kernel(at: int) -> tuple[Statement, list[Trip]]:
    family, problem = find_problem(load("gemm_n128_k2048"), {"M": 17})
    space = enumerate_space(family, problem, H200)
    strategy = space.strategy(int(space.codes[at]))
    return family.build(problem, strategy, H200), family.trips(problem, strategy, H200)


def test_a_kernel_is_proven_once_and_a_changed_one_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def check(lowered: Statement, trips: Sequence[Trip], device: Device) -> list[str]:
        calls.append(digest(lowered))
        return ["proven"]

    monkeypatch.setattr("ptxflow.compiler.check.check", check)
    one, trips = a_kernel(0)
    other, _ = a_kernel(1)
    assert cache.check(one, trips, H200) == cache.check(one, trips, H200) == ["proven"]
    assert calls == [digest(one)]
    cache.check(other, trips, H200)
    cache.check(one, trips[1:], H200)
    cache.check(one, trips, B200)
    path, _ = next((path, node) for path, node in walk(one) if node.op is Op.ATOM)
    cache.check(edit(one, path, ()), trips, H200)
    assert len(calls) == 5 and len(set(calls)) == 3


def test_a_refusal_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, trips = a_kernel(0)
    wait = next(path for path, n in walk(kernel) if n.op is Op.ATOM and "wait" in n.arg.atom)
    broken = edit(kernel, wait, ())
    for _ in range(2):
        with pytest.raises(HazardError):
            cache.check(broken, trips, H200)
    assert not entries(folder)


def test_an_entry_at_another_ones_place_is_seen(folder: Path) -> None:
    kept = cache.store()
    kept.put("ab" * 32, b"mine")
    (entry,) = entries(folder)
    (folder / "cd").mkdir()
    entry.rename(folder / "cd" / ("cd" * 31))
    assert kept.get("cd" * 32) is None and kept.get("ab" * 32) is None


def write(folder: str, seed: int) -> int:
    """Puts and gets payloads of few keys, of which another process writes the same; how many reads
    were neither right nor none."""
    kept, rng, wrong = cache.Store(Path(folder)), random.Random(seed), 0
    for _ in range(200):
        name = cache.key(str(rng.randrange(8)))
        kept.put(name, name.encode() * 1000)
        asked = cache.key(str(rng.randrange(8)))
        wrong += kept.get(asked) not in (None, asked.encode() * 1000)
    return wrong


def test_many_writers_need_no_lock(tmp_path: Path) -> None:
    with Processes(2) as pool:
        assert sum(pool.map(write, [str(tmp_path)] * 2, range(2))) == 0
    assert len(entries(tmp_path)) == 8 and cache.Store(tmp_path).clear(0.0, True)[0] == 8


def test_what_is_unused_or_damaged_is_cleared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, day = cache.store(), 86400.0
    for letter in "abc":
        kept.put(letter * 64, b"payload")
    old, bad, _ = entries(folder)
    os.utime(old, (0, time.time() - 9 * day))
    bad.write_bytes(bad.read_bytes()[:-1])
    (folder / "aa" / ".new-left").write_bytes(b"")
    os.utime(folder / "aa" / ".new-left", (0, 0))
    assert main(["--unused", "8", "--damaged"]) == 0
    assert "1 entries" in (said := capsys.readouterr().out) and "2 removed" in said
    assert entries(folder) == [folder / "cc" / ("c" * 62)]
    os.utime(entries(folder)[0], (0, time.time() - 9 * day))
    assert kept.get("c" * 64) == b"payload"  # it is used: it stays
    assert kept.clear(time.time() - 8 * day) == (1, 72, 0)


def test_a_url_is_a_cache_of_many_hosts(tmp_path: Path) -> None:
    there = f"memory://{tmp_path}"
    one, other = (cache.Remote(there, cache.Store(tmp_path / host)) for host in "ab")
    one.put("ab" * 32, b"payload")
    assert other.get("ab" * 32) == b"payload" and other.get("cd" * 32) is None
    assert other.near.get("ab" * 32) == b"payload"
    assert [(name, size) for name, size, _ in other.entries()] == [("ab" * 32, 72)]
    one.files.pipe_file(one._at("ab" * 32), b"torn")
    assert cache.Remote(there, cache.Store(tmp_path / "c")).get("ab" * 32) is None
    one.put("cd" * 32, b"payload")
    assert other.clear(0.0, damaged=True) == (1, 72, 1)
    assert other.clear(time.time() + 1) == (0, 0, 1) and not [*other.entries()]


def test_a_url_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cache.VARIABLE, "nothing://there")
    assert main([]) == 2
    assert "cache: PTXFLOW_CACHE=nothing://there: " in capsys.readouterr().err
