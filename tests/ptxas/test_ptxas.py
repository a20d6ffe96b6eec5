"""ptxas as a subprocess: figures, notes, refusals, timeouts, and where it is looked for."""

import os
import subprocess
from pathlib import Path

import pytest

from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptxas import PtxasError, ToolMissing

ARCHS = ("sm_90a", "sm_100a")


def program(body: str, arch: str = "sm_90a", bounds: str = ".reqntid 128\n.minnctapersm 1") -> str:
    return f""".version 8.8
.target {arch}
.address_size 64
.visible .entry k(.param .u64 out)
{bounds}
{{
.reg .b64 %rd<4>;
.reg .b32 %r<256>;
.shared .align 16 .b8 tile[1024];
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
{body}
ret;
}}
"""


STORE = "st.global.u32 [%rd1], %r1;"
SPILL = "\n".join(
    [f"ld.volatile.global.u32 %r{i + 10}, [%rd1+{4 * i}];" for i in range(80)]
    + [f"st.volatile.global.u32 [%rd1+{4 * i}], %r{i + 10};" for i in range(80)]
)
LOCAL = """.local .align 16 .b8 own[64];
.reg .b64 %p<3>;
mov.u64 %p1, own;
mul.wide.u32 %rd2, %r1, 4;
add.u64 %p2, %p1, %rd2;
st.local.u32 [%p2], %r1;
ld.local.u32 %r2, [own+4];
st.global.u32 [%rd1], %r2;"""


@pytest.mark.parametrize("arch", ARCHS)
def test_assembles_and_reports(arch: str) -> None:
    made = ptxas.assemble(program("bar.sync 1;\n" + STORE, arch), arch)
    assert made.cubin.startswith(b"\x7fELF") and made.arch == arch
    assert made.usage.registers > 0
    assert made.usage.barriers >= 1
    assert made.version == ptxas.version()
    assert (made.usage.spill_stores, made.usage.stack, made.notes, made.warnings) == (0, 0, (), ())
    assert ptxas.check(made) == []


def test_static_shared_memory_is_counted() -> None:
    text = program("mov.u32 %r2, tile;\nst.shared.u32 [%r2], %r1;\n" + STORE)
    assert ptxas.assemble(text, "sm_90a").usage.smem == 1024


def test_the_pipe_gives_the_same_cubin_as_a_file(tmp_path: Path) -> None:
    text, out = program(STORE), tmp_path / "k.cubin"
    command = [str(ptxas.executable()), "-arch=sm_90a", *ptxas.FLAGS, "-o", str(out), "-"]
    subprocess.run(command, input=text.encode(), check=True, capture_output=True)
    assert ptxas.assemble(text, "sm_90a").cubin == out.read_bytes()


def test_spills_are_a_complaint() -> None:
    made = ptxas.assemble(program(SPILL, bounds=".maxnreg 32"), "sm_90a")
    assert made.usage.spill_stores > 0 and made.usage.spill_loads > 0 and made.usage.stack > 0
    spill, stack = ptxas.check(made)
    assert f"{made.usage.spill_stores} bytes of stores" in spill and "stack" in stack


def test_local_memory_is_a_complaint() -> None:
    made = ptxas.assemble(program(LOCAL), "sm_90a")
    assert made.usage.spill_stores == 0
    assert [c for c in ptxas.check(made) if "local memory" in c]


def test_ignored_setmaxnreg_is_a_note_and_a_complaint() -> None:
    text = program("setmaxnreg.inc.sync.aligned.u32 232;\n" + STORE, bounds="")
    made = ptxas.assemble(text, "sm_90a")
    assert [note.code for note in made.notes] == ["C7508"]
    assert "setmaxnreg" in made.notes[0].text
    assert ptxas.check(made)[0].startswith("C7508: ")
    bounded = program("setmaxnreg.inc.sync.aligned.u32 232;\n" + STORE)
    assert ptxas.assemble(bounded, "sm_90a").notes == ()


def test_other_warnings_are_complaints() -> None:
    text = program(STORE, bounds=".reqntid 128\n.minnctapersm 64")
    made = ptxas.assemble(text, "sm_90a")
    assert made.warnings and ptxas.check(made) == [f"warning: {w}" for w in made.warnings]


def test_refusal_names_line_and_text() -> None:
    text = program("movx.u32 %r2, %r1;")
    with pytest.raises(PtxasError) as caught:
        ptxas.assemble(text, "sm_90a")
    line = caught.value.line
    assert line is not None and text.splitlines()[line - 1] == "movx.u32 %r2, %r1;"
    message = str(caught.value)
    assert "movx" in message and f"line {line}" in message and "\n" not in message
    assert "`movx.u32 %r2, %r1;`" in message


def test_refusal_without_a_line() -> None:
    with pytest.raises(PtxasError, match="sm_100a") as caught:
        ptxas.assemble(program(STORE, "sm_90a"), "sm_100a")
    assert caught.value.line is None


def test_report_round_trip() -> None:
    made = ptxas.assemble(program(SPILL, bounds=".maxnreg 32"), "sm_90a")
    assert ptxas.from_report(made.cubin, ptxas.report_json(made)) == made


def fake_tool(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_override_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = fake_tool(tmp_path / "mine", f'exec "{ptxas.executable()}" "$@"')
    monkeypatch.setenv(ptxas.OVERRIDE, str(tool))
    assert ptxas.executable() == tool
    assert ptxas.assemble(program(STORE), "sm_90a").usage.registers > 0


def test_a_wrong_override_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ptxas.OVERRIDE, str(tmp_path / "gone"))
    with pytest.raises(ToolMissing, match=f"{ptxas.OVERRIDE}=.*gone"):
        ptxas.assemble(program(STORE), "sm_90a")


def test_the_wheel_goes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ptxas.OVERRIDE, raising=False)
    fake_tool(tmp_path / "ptxas", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert ptxas.executable().parent != tmp_path
    monkeypatch.setattr(ptxas, "_pathfinder", lambda name: None)
    assert ptxas.executable() == tmp_path / "ptxas"


def test_missing_tool_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ptxas.OVERRIDE, raising=False)
    monkeypatch.setattr(ptxas, "_pathfinder", lambda name: None)
    monkeypatch.setattr(ptxas, "DEFAULT_BIN", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissing) as caught:
        ptxas.assemble(program(STORE), "sm_90a")
    message = str(caught.value)
    assert f"pip install {ptxas.WHEEL}" in message and ptxas.OVERRIDE in message
    assert "\n" not in message


def test_a_hanging_tool_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = fake_tool(
        tmp_path / "slow", '[ "$1" = --version ] && echo "release 13.0, V13.0.88" || exec sleep 30'
    )
    monkeypatch.setenv(ptxas.OVERRIDE, str(tool))
    with pytest.raises(PtxasError, match="did not finish"):
        ptxas.assemble(program(STORE), "sm_90a", timeout=0.2)
