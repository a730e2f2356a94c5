"""``run.json``: that a folder is a training run, and how it was begun. Imports no mlx."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_spec.errors import CheckpointError, OptionError

RECORD = "run.json"


def read_record(run: Path) -> dict[str, Any]:
    """Raises OptionError where ``run`` is no training run, CheckpointError where its record is damaged."""
    if not (run / RECORD).is_file():
        raise OptionError(f"{run} holds no training run to resume ({RECORD}); name the --out folder of one")
    try:
        record = json.loads((run / RECORD).read_text(encoding="utf-8"))
        record["settings"]["target"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{run / RECORD} is damaged ({error}); begin a new run in another --out") from error
    return dict(record)
