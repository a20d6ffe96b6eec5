"""A library's folder: what is written is read back, and every fault is one line."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.library.manifest import (
    Dispatch,
    DispatchAxis,
    File,
    LibraryError,
    Manifest,
    Member,
    Target,
    read_file,
    read_manifest,
    write_files,
    write_library,
)
from tests.library.made import FILES, GEMM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_library(tmp_path / "lib", GEMM, FILES)
    return tmp_path / "lib"


def test_a_folder_that_another_moves_is_filled_where_it_is(tmp_path: Path) -> None:
    """And stays the one that the other has locked."""
    (folder := tmp_path / "part").mkdir()
    locked = folder.stat().st_ino
    write_files(folder, GEMM, FILES)
    assert read_manifest(folder) == GEMM and folder.stat().st_ino == locked
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_it_comes_back_whole(folder: Path) -> None:
    assert read_manifest(folder) == GEMM
    assert {f.name: read_file(folder, f) for f in GEMM.files} == FILES
    write_library(folder, replace(GEMM, tools={"ptxas": "13.0"}), FILES)
    assert read_manifest(folder).tools == {"ptxas": "13.0"}
    assert [p.name for p in folder.parent.iterdir()] == ["lib"]


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(LibraryError, match="no library"):
        write_library(tmp_path, GEMM, FILES)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_files_must_be_what_the_manifest_says(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"a\.ptx is not given"):
        write_library(tmp_path / "lib", GEMM, FILES | {"a.ptx": b"other"})
    assert not list(tmp_path.iterdir())


def test_dispatch_is_a_row_major_grid() -> None:
    axes = (DispatchAxis("M", (16, 64)), DispatchAxis("N", (8, 16, 32)))
    dispatch = Dispatch(axes, (0, 1, 2, 3, 4, 5))
    found = [dispatch.member({"M": m, "N": n}) for m, n in ((1, 1), (16, 9), (17, 8), (64, 32))]
    assert found == [0, 1, 3, 5]
    assert dispatch.member({"M": 65, "N": 1}) is None
    assert Dispatch((), (0,)).member({}) == 0


def test_sizes_outside_go_to_the_general_member() -> None:
    assert GEMM.serving({"M": 4096}) == 1
    with pytest.raises(LibraryError, match="M=4097, outside 1 to 4096"):
        GEMM.serving({"M": 4097})
    assert replace(GEMM, general=0).serving({"M": 4097}) == 0


def test_processes_with_one_library_choose_alike(folder: Path) -> None:
    code = (
        "import sys; from ptxflow.compiler.library.manifest import read_manifest\n"
        "held = read_manifest(sys.argv[1])\n"
        "print([held.serving({'M': m}) for m in range(1, 4097)])"
    )
    run = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", code, str(folder)]
    asked = [run(command, env=os.environ | {"PYTHONHASHSEED": str(i)}) for i in range(4)]
    said = {process.communicate()[0] for process in asked}
    assert said == {f"{[GEMM.serving({'M': m}) for m in range(1, 4097)]}\n"}
    assert len(set(json.loads(said.pop()))) > 1


def edited(folder: Path, edit: Callable[[Any], Any]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def put(*keys: Any) -> Callable[[Any], None]:
    """Sets the value at the end of a path of keys."""

    def edit(data: Any) -> None:
        *path, last, value = keys
        for key in path:
            data = data[key]
        data[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (put("schema", 2), "schema 2: this ptxflow reads schema 1"),
        (lambda d: d.pop("schema"), "no schema"),
        (lambda d: d.pop("members"), "'members' is missing"),
        (put("members", []), "0 members"),
        (put("members", 0, "cubin", "name", "../a.cubin"), "plain file name"),
        (put("members", 0, "cubin", "name", "/etc/passwd"), "plain file name"),
        (put("members", 0, "cubin", "size", 1 << 40), "1 to 67108864"),
        (put("members", 0, "launch", "grid", ["M // 0", "1", "1"]), "division"),
        (put("members", 0, "launch", "grid", ["open", "1", "1"]), "cannot evaluate"),
        (put("members", 0, "launch", {}), "launch of member a"),
        (put("members", 0, "registers", "many"), "registers must be int"),
        (put("dispatch", "cells", [0]), "1 cells for a grid of 2"),
        (put("dispatch", "cells", [0, 2]), "member 2 of 2"),
        (put("dispatch", "axes", 0, "bounds", [64, 16]), "do not ascend"),
        (put("general", 7), "member 7 of 2"),
        (put("ranges", "M", [9, 1]), "must be [low, high]"),
        (put("ranges", "K", [1, 9]), "K is no variable axis"),
        (put("target", 5), "wrong type"),
        (put("definition", []), "definition must be dict"),
    ],
)
def test_a_wrong_manifest_is_one_line(folder: Path, edit: Callable[[Any], Any], line: str) -> None:
    edited(folder, edit)
    with pytest.raises(LibraryError) as error:
        read_manifest(folder)
    text = str(error.value)
    assert text.startswith(str(folder)) and line in text and "\n" not in text


def test_files_are_checked(folder: Path, tmp_path: Path) -> None:
    cubin, outside = folder / "a.cubin", tmp_path / "outside"
    whole = cubin.read_bytes()

    def link() -> None:
        outside.write_bytes(whole)
        cubin.symlink_to(outside)

    faults: dict[str, Callable[[], object]] = {
        "size": lambda: cubin.write_bytes(whole[:-1]),
        "SHA-256": lambda: cubin.write_bytes(b"?" * len(whole)),
        "more than": lambda: cubin.write_bytes(whole + b"."),
        "No such file": cubin.unlink,
        "leads out": link,
    }
    for line, spoil in faults.items():
        spoil()
        with pytest.raises(LibraryError, match=line):
            read_file(folder, GEMM.members[0].cubin)


def test_a_missing_manifest_is_one_line(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(LibraryError, match=r"manifest\.json: No such file"):
        read_manifest(folder)


def test_the_types_are_plain_data() -> None:
    file = File.of("x", b"abc")
    member = Member("x", {}, GEMM.members[0].launch, file, file, 1, 0)
    manifest = Manifest(GEMM.definition, Target("h200", "sm_90a", (9, 0)), {}, (member,),
                        Dispatch((), (0,)))  # fmt: skip
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
