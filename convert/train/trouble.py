"""What can go wrong in training only. Knows no file."""

from __future__ import annotations

from mlx_spec.errors import MlxSpecError


class TrainingError(MlxSpecError):
    """Training cannot go on: the loss is not a number, or nothing is left to learn from."""
