"""Training: the loop, what it is made of, and what it leaves behind (checkpoints, weights, live metrics)."""
