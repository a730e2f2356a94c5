"""Where something came from: versions, machine, BLAS. Reads no environment."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_spec import blas


def versions() -> dict[str, Any]:
    """The packages that decide what is computed, and on what."""
    found = {name: version(name) for name in ("mlx-spec", "mlx", "mlx-lm", "numpy")}
    device = "metal" if mx.default_device() == mx.Device(mx.gpu) else f"cpu ({blas.active()} BLAS)"
    return found | {
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
        "cores": os.cpu_count(),
        "device": device,
    }
