"""From a name to a loaded mlx-lm model, with one sentence for whatever is wrong. Knows files, no drafter."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load as mlx_lm_load

from mlx_spec import hub
from mlx_spec.errors import CheckpointError, UnsupportedError
from mlx_spec.folders import FolderInfo
from mlx_spec.targets.skeleton import refuse_unsupported


def find_target(name: str | Path, revision: str | None = None) -> FolderInfo:
    """The checked folder of a path, a hub id or a pulled model; nothing of its weights but their headers is read.

    Raises ModelNotFoundError, PairError (a drafter where a model belongs), CheckpointError and, for a hub id before its
    weights are fetched, UnsupportedError.
    """
    folder = hub.resolve(name, revision=revision, check=lambda config: refuse_unsupported(config, name))
    found = hub.check_target(folder)
    if glob.has_magic(str(folder)):
        raise CheckpointError(f"{folder}: mlx-lm finds no weights in a path with [, * or ?; rename the folder")
    return found


def load_target(
    folder: Path, trust_remote_code: bool = False, **options: Any
) -> tuple[Any, TokenizerWrapper, dict[str, Any]]:
    """(model, tokenizer, config) of a folder.

    ``options`` are ``mlx_lm.load``'s. Raises CheckpointError (incomplete files, weights that are not numbers) and
    UnsupportedError.
    """
    try:
        model, tokenizer, config = mlx_lm_load(
            str(folder), return_config=True, trust_remote_code=trust_remote_code, **options
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: {error}; complete the folder or pull the model again") from error
    except KeyError as error:
        raise CheckpointError(f"{folder}/config.json lacks {error}; it is not a complete model config") from error
    except TypeError as error:  # mlx-lm builds its arguments from the config; what is missing is in the message
        raise CheckpointError(f"{folder}/config.json is not a complete model config: {error}") from error
    except ValueError as error:
        text = " ".join(str(error).split())
        kind = UnsupportedError if "not supported" in text or "trust_remote_code" in text else CheckpointError
        raise kind(f"{folder} cannot be loaded: {text[:300]}") from error
    if not options.get("lazy"):
        _refuse_nan(folder, model)
    return model, tokenizer, config


def _refuse_nan(folder: Path, model: Any) -> None:
    """One reduction over every floating tensor, one read."""
    parameters = tree_flatten(model.parameters())
    flat = [(path, array) for path, array in parameters if mx.issubdtype(array.dtype, mx.floating)]
    finite = mx.stack([mx.isfinite(array).all() for _, array in flat])
    if finite.all().item():
        return
    named = [path for index, (path, _) in enumerate(flat) if not finite[index].item()]
    raise CheckpointError(f"{folder}: {named[0]} holds values that are not finite numbers; pull the model again")
