"""What kernels are timed beside. `registry` makes baselines and needs torch; what their names mean
does not, so that tables of records are printed without it."""

#: chains of PyTorch operations, each through memory: the definition's reference and the like.
#: A single operation, a compiled formula or a call of a library is none.
EAGER = frozenset({"torch", "torch.chunked", "torch.grouped"})
#: operators for which PyTorch has one tuned operation: a baseline with its name is that one
TUNED = ("gemm", "rmsnorm", "fused_add_rmsnorm")


def is_eager_reference(definition_or_op: str, baseline_name: str) -> bool:
    """Whether a baseline of a definition (its name, or its op type) is no tuned kernel.

    A ratio to it says how slow a chain of operations is, and nothing of how good a kernel is: it
    stands apart from those to libraries, labelled so.
    """
    return baseline_name in EAGER and not definition_or_op.startswith(TUNED)
