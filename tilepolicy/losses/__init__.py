"""Cross-entropy losses that never hold the one-hot targets or all logits."""
