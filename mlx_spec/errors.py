"""What can go wrong, one class per next step. Knows nothing of exit codes, terminals or HTTP.

Every message is one sentence for the user: what is wrong, the offending value, what to do next.
"""

from __future__ import annotations


class MlxSpecError(Exception):
    """Base of every error mlx-spec raises on purpose."""


class OptionError(MlxSpecError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class UnsupportedError(MlxSpecError):
    """A model, layer, cache kind or configuration key that this version does not implement; it is named."""


class ModelNotFoundError(MlxSpecError):
    """No such folder, hub id or pulled model."""


class OfflineError(ModelNotFoundError):
    """The model is not on this machine and the hub cannot be reached."""


class CheckpointError(MlxSpecError):
    """Files are there, but they are incomplete, malformed, or hold values that cannot be right (NaN)."""


class PairError(MlxSpecError):
    """A drafter and a target that do not belong together."""


class ContextLengthError(MlxSpecError):
    """The prompt does not fit into the target's context."""


class DrafterError(MlxSpecError):
    """A drafter failed while proposing or ingesting; the text committed so far is the target's own."""


class SessionError(MlxSpecError):
    """A conversation or prompt cache that two requests use at once, or that is not this engine's."""


class EvaluationError(MlxSpecError, RuntimeError):
    """MLX failed while computing; the message is its own. The conversation is computed anew by its next request."""


class ResourceError(MlxSpecError):
    """Not enough memory or disk; the message holds both numbers."""
