"""Checkpoints in, MLX folders out: one file a source format. Knows the engine's files and errors, no front end."""
