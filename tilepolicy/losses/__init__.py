"""Cross-entropy losses that never hold the one-hot targets or all logits.

Plain JAX functions, usable without MaxText. Importing this package imports jax; the core of
tilepolicy never imports it.
"""

from tilepolicy.losses.adaptive import (
    AdaptiveLoss,
    LossDecision,
    make_adaptive_sparse_cross_entropy,
)
from tilepolicy.losses.chunked import (
    chunked_sparse_cross_entropy,
    chunked_sparse_cross_entropy_fn,
)
from tilepolicy.losses.layout import LossSharding
from tilepolicy.losses.online import online_sparse_cross_entropy
from tilepolicy.losses.sparse import sparse_cross_entropy_with_logits

__all__ = [
    "AdaptiveLoss",
    "LossDecision",
    "LossSharding",
    "chunked_sparse_cross_entropy",
    "chunked_sparse_cross_entropy_fn",
    "make_adaptive_sparse_cross_entropy",
    "online_sparse_cross_entropy",
    "sparse_cross_entropy_with_logits",
]
