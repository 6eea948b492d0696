"""What the TPU compiler said of tiles, for the rules that say it without a compiler."""

from __future__ import annotations

from tilepolicy.settings import Pass
from tilepolicy.tuning.sites import Backend

SIZES = {"batch_seq": 1024, "embed_dim": 256, "mlp_dim": 384}

# The verdicts of the v6e compiler for lhs [1024, 256] x rhs [4, 256, 384] in bfloat16 as wi:
# backend, pass, tile by axis, and the axis that it refuses. ``test_backends_compiled.py`` asks it
# again.
COMPILED: list[tuple[Backend, Pass, tuple[int, int, int], str | None]] = [
    ("megablox", "fwd", (512, 1024, 1024), None),
    ("megablox", "fwd", (512, 256, 384), None),
    ("megablox", "fwd", (512, 256, 192), "mlp_dim"),
    ("megablox", "fwd", (512, 192, 384), None),
    ("megablox", "fwd", (300, 128, 128), "batch_seq"),
    ("megablox", "fwd", (2048, 128, 128), "batch_seq"),
    ("megablox", "fwd", (8, 128, 128), None),
    ("megablox", "fwd", (4, 128, 128), "batch_seq"),
    ("megablox", "drhs", (512, 256, 192), "mlp_dim"),
    ("megablox", "drhs", (512, 192, 384), None),
    ("megablox", "drhs", (300, 128, 128), "batch_seq"),
    ("tokamax_v2", "fwd", (512, 1024, 1024), None),
    ("tokamax_v2", "fwd", (512, 256, 192), "mlp_dim"),
    ("tokamax_v2", "fwd", (512, 192, 384), "embed_dim"),
    ("tokamax_v2", "fwd", (300, 256, 256), "batch_seq"),
    ("tokamax_v2", "fwd", (296, 256, 384), None),
    ("tokamax_v2", "fwd", (2048, 256, 256), None),
    ("tokamax_v2", "fwd", (7, 128, 128), "batch_seq"),
    ("tokamax_v2", "drhs", (300, 256, 256), "batch_seq"),
    ("tokamax_v2", "drhs", (7, 128, 128), "batch_seq"),
    ("tokamax_v2", "drhs", (512, 256, 192), "mlp_dim"),
    ("tokamax_v1", "fwd", (512, 1024, 1024), None),
    ("tokamax_v1", "fwd", (512, 256, 192), "mlp_dim"),
    ("tokamax_v1", "fwd", (512, 192, 384), "embed_dim"),
    ("tokamax_v1", "fwd", (300, 128, 128), "batch_seq"),
    ("tokamax_v1", "fwd", (2048, 256, 256), "batch_seq"),
    ("tokamax_v1", "fwd", (4, 128, 128), None),
]
