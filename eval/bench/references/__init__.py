"""Our references, one module per group of operators, and how one becomes self-contained text.

An operator is known by its op type, its input names and the pattern of its shapes. `source` cuts
the operator's function out of its module together with what it uses, calls it `run`, and sets the
module's constants: those named after an axis (TOPK) take that axis's value.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ptxflow.env.tasks.definition import Definition, DefinitionError

_GQA, _MLA = "q k_cache v_cache", "q_nope q_pe ckv_cache kpe_cache"
_PAGES, _LAST = "kv_indptr kv_indices", "kv_last_page_len"
_MOE = (
    "routing_logits routing_bias hidden_states hidden_states_scale gemm1_weights "
    "gemm1_weights_scale gemm2_weights gemm2_weights_scale local_expert_offset "
    "routed_scaling_factor"
)

# op type and input names -> module, function
FUNCTIONS: dict[tuple[str, str], tuple[str, str]] = {
    ("gemm", "A B"): ("gemm", "gemm"),
    ("rmsnorm", "hidden_states weight"): ("rmsnorm", "rmsnorm"),
    ("rmsnorm", "hidden_states residual weight"): ("rmsnorm", "fused_add_rmsnorm"),
    ("sampling", "probs top_k"): ("sampling", "top_k_sampling"),
    ("sampling", "probs top_p"): ("sampling", "top_p_sampling"),
    ("sampling", "probs top_k top_p"): ("sampling", "top_k_top_p_sampling"),
    ("gqa_ragged", "q k v qo_indptr kv_indptr sm_scale"): ("attention", "gqa_ragged_prefill"),
    ("dsa_paged", f"{_MLA} sparse_indices sm_scale"): ("dsa", "sparse_attention"),
    ("dsa_paged", "q_index_fp8 k_index_cache_fp8 weights seq_lens block_table"): (
        "dsa",
        "topk_indexer",
    ),
    ("gdn", "q k v state A_log a dt_bias b scale"): ("gdn", "gdn_decode"),
    ("gdn", "q k v state A_log a dt_bias b cu_seqlens scale"): ("gdn", "gdn_prefill"),
    ("moe", _MOE): ("moe", "moe"),
} | {
    (f"{kind}_paged", f"{tensors}{queries} {_PAGES}{last} sm_scale"): (
        "attention",
        f"{kind}_paged_{'prefill' if queries else 'decode'}{'_pages' if last else ''}",
    )
    for kind, tensors in (("gqa", _GQA), ("mla", _MLA))
    for queries in ("", " qo_indptr")
    for last in ("", f" {_LAST}")
}

# constants of single definitions that are not axes
CONSTANTS: dict[str, dict[str, Any]] = {
    "rmsnorm_h4096": {"EPS": 1e-5},
    "fused_add_rmsnorm_h4096": {"EPS": 1e-5},
}


def load_reference(definition: Definition) -> Callable[..., Any]:
    """The function `run(*inputs)` that returns the output, or a tuple of the outputs: that of the
    definition itself, or ours of an operator that we know. DefinitionError where there is none."""
    text = definition.source or source(definition)
    if not text:
        raise DefinitionError(
            f"{definition.name}: no reference in the definition, and ptxflow has none for op_type "
            f"{definition.op_type!r} with inputs {', '.join(definition.inputs)}"
        )
    namespace: dict[str, Any] = {"__name__": f"reference of {definition.name}"}
    try:
        exec(compile(text, f"<reference of {definition.name}>", "exec"), namespace)
    except Exception as error:
        raise DefinitionError(f"{definition.name}: its reference does not load: {error}") from error
    run: Callable[..., Any] = namespace["run"]
    return run


def source(definition: Definition) -> str | None:
    """The reference of a definition as Python text with a function `run`; None if unknown."""
    found = FUNCTIONS.get((definition.op_type, " ".join(definition.inputs)))
    if found is None or not _same_layout(definition):
        return None
    module, function = found
    axes = {name.upper(): value for name, value in definition.const_axes.items()}
    constants = axes | CONSTANTS.get(definition.name, {})
    text = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    return extract(text, function, constants)


def _same_layout(definition: Definition) -> bool:
    """Whether a matrix product is A [M, K], B [N, K] -> C [M, N] and not another layout."""
    if definition.op_type != "gemm":
        return True
    shapes = [t.shape for t in (*definition.inputs.values(), *definition.outputs.values())]
    match shapes:
        case [(m, k), (n, k2), (m2, n2)]:
            return (m, n, k) == (m2, n2, k2)
    return False


def extract(text: str, function: str, constants: dict[str, Any]) -> str:
    """The function and every top-level name it reaches, in order, with the function named `run`."""
    nodes = {name: node for node in ast.parse(text).body for name in _bound(node)}
    reached, todo = set(), [function]
    while todo:
        name = todo.pop()
        if name in reached or name not in nodes:
            continue
        reached.add(name)
        todo += [n.id for n in ast.walk(nodes[name]) if isinstance(n, ast.Name)]
    lines, out = text.splitlines(), ""
    previous: type[ast.stmt] | None = None
    for name, node in nodes.items():
        if name not in reached:
            continue
        first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        piece = "\n".join(lines[first - 1 : node.end_lineno])
        if isinstance(node, ast.Assign) and name in constants:
            piece = f"{name} = {constants[name]!r}"
        if name == function:
            piece = piece.replace(f"def {function}(", "def run(", 1)
        gap = 2 if isinstance(node, ast.FunctionDef) else int(_statement(node) is not previous)
        out += "\n" * (gap if out else 0) + piece + "\n"
        previous = _statement(node)
    return out


def _statement(node: ast.stmt) -> type[ast.stmt]:
    """Its kind, with both forms of import as one."""
    return ast.Import if isinstance(node, ast.ImportFrom) else type(node)


def _bound(node: ast.stmt) -> list[str]:
    """The names a top-level statement defines."""
    match node:
        case ast.FunctionDef(name=name):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []
