"""What kernels are timed beside. `beside` makes peers and needs torch; what their names mean does
not, so that tables of records are printed without it."""

from __future__ import annotations

#: peers that are PyTorch operations one after the other, each through memory: the definition's
#: reference and the like. A single operation, a compiled formula or a library's call is none.
EAGER = frozenset({"torch", "torch.chunked", "torch.grouped"})
#: operators for which PyTorch has one tuned operation: whatever peer is called after it, is that
TUNED = ("gemm", "rmsnorm", "fused_add_rmsnorm")


def is_eager_reference(definition_or_op: str, peer_name: str) -> bool:
    """Whether a peer of a definition (its name, or its op type) is no tuned kernel.

    A ratio to it says how slow a chain of operations is, and nothing of how good a kernel is: it
    stands apart from those to libraries, labelled so.
    """
    return peer_name in EAGER and not definition_or_op.startswith(TUNED)
