"""Training of DFlash drafters: the target answers prompts (``make_data``), a drafter learns from that (``train``).

Names resolve on first use, so that a front end can read the settings' table before mlx is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_spec.convert.train.data import make_data
    from mlx_spec.convert.train.run import export, resume, train
    from mlx_spec.convert.train.settings import DataSettings, TrainSettings
    from mlx_spec.convert.train.trouble import TrainingError

_HOMES = {
    "DataSettings": "settings",
    "TrainSettings": "settings",
    "TrainingError": "trouble",
    "export": "run",
    "make_data": "data",
    "resume": "run",
    "train": "run",
}

__all__ = ["DataSettings", "TrainSettings", "TrainingError", "export", "make_data", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
