"""What serving a model needs, from configurations of published sizes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ptxflow.command import BadInput
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.sample import model_shapes
from ptxflow.eval.sample.model_shapes import Config, Serving, main, needs

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
QWEN = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "num_experts": 128, "moe_intermediate_size": 768}  # fmt: skip
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
            "moe_intermediate_size": 2048, "num_attention_heads": 128, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "vocab_size": 129280, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3}  # fmt: skip
EIGHT = Serving(tp=8, ep=8)


def needed(data: dict[str, Any], serving: Serving) -> tuple[set[str], list[str]]:
    found, missing = needs(Config(data, "config.json"), serving)
    return {f.definition.name for f in found}, missing


@pytest.mark.parametrize(
    ("data", "serving", "own"),
    [
        (LLAMA, Serving(), {"gemm_n128256_k4096"}),
        (QWEN, Serving(), {"gemm_n151936_k2048"}),
        (
            DEEPSEEK,
            EIGHT,
            {"gemm_n16160_k7168", "gemm_n1536_k7168", "gemm_n3072_k1536", "gemm_n576_k7168",
             "gemm_n7168_k2048", "gemm_n512_k7168", "gemm_n7168_k256", "gemm_n4608_k7168",
             "gemm_n7168_k2304"},
        ),
    ],
    ids=["llama", "qwen", "deepseek"],
)  # fmt: skip
def test_models_that_the_46_are_of_need_these(
    data: dict[str, Any], serving: Serving, own: set[str]
) -> None:
    found, _ = needed(data, serving)
    assert found - set(names()) == own
    hidden = data["hidden_size"]
    norms = {f"rmsnorm_h{hidden}", f"fused_add_rmsnorm_h{hidden}"}
    assert norms | {f"top_k_sampling_from_probs_v{data['vocab_size']}"} <= found


def test_heads_and_experts_are_spread() -> None:
    found, _ = needed(DEEPSEEK, EIGHT)
    expected = {"mla_paged_decode_h16_ckv512_kpe64_ps64",
                "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"}  # fmt: skip
    assert expected <= found
    alone, _ = needed(DEEPSEEK, Serving(page=1))
    assert "mla_paged_decode_h128_ckv512_kpe64_ps1" in alone


def test_a_sparse_attention_brings_its_indexer() -> None:
    indexed = {"index_topk": 256, "index_n_heads": 64, "index_head_dim": 128}
    found, _ = needed({**DEEPSEEK, **indexed}, EIGHT)
    assert {"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps64",
            "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"} <= found  # fmt: skip


def test_what_nothing_covers_is_said() -> None:
    assert any("softmax routing" in line for line in needed(QWEN, Serving())[1])
    other = {**DEEPSEEK, "n_group": 4}
    found, missing = needed(other, EIGHT)
    assert not any(name.startswith("moe") for name in found)
    assert any("routed otherwise" in line for line in missing)


@pytest.mark.parametrize(
    ("data", "serving", "why"),
    [
        ({**LLAMA, "model_type": "mamba"}, Serving(), "model_type 'mamba' is not known"),
        ({**LLAMA, "hidden_size": None}, Serving(), "'hidden_size' must be a positive integer"),
        ({**LLAMA, "vocab_size": "many"}, Serving(), "'vocab_size' must be a positive integer"),
        (LLAMA, Serving(tp=5), "--tp 5"),
        (DEEPSEEK, Serving(ep=7), "--ep 7"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    data: dict[str, Any], serving: Serving, why: str
) -> None:
    with pytest.raises(BadInput, match=why) as raised:
        needed(data, serving)
    assert len(str(raised.value).splitlines()) == 1


def written(tmp_path: Path, data: dict[str, Any]) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(data))
    return [str(tmp_path / "config.json"), "--out", str(tmp_path / "out")]


def test_definitions_are_written_that_load(tmp_path: Path) -> None:
    smaller = DEEPSEEK | {"moe_intermediate_size": 1024}
    assert main([*written(tmp_path, smaller), "--tp", "8", "--ep", "4"]) == 0
    for path in (tmp_path / "out" / "definitions").glob("*.json"):
        definition = load(path)
        assert definition.name == path.stem and definition.source
    (path,) = (tmp_path / "out" / "definitions").glob("moe*_e64_h7168_i1024.json")
    assert load(path).const_axes["num_gemm1_out_blocks"] == 2 * 1024 // 128
    lines = (tmp_path / "out" / "libraries.sh").read_text().splitlines()
    assert all(line.startswith("python -m ptxflow sample --definition ") for line in lines)


def test_libraries_are_made_once_and_billed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def sample(command: list[str]) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--library") + 1])
        made.append(folder.name)
        if len(made) == 2:
            return subprocess.CompletedProcess(command, 1)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"members": [{}, {}]}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(model_shapes.subprocess, "run", sample)
    argv = [*written(tmp_path, LLAMA), "--libraries"]
    assert main(argv) == 1
    capsys.readouterr()
    first = len(made)
    assert main(argv) == 0
    assert len(made) == first + 1 and made[-1] == made[1]
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["in", "all", str(2 * first)]
