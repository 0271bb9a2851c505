"""Every error that Esper raises on purpose.

The command line turns any of them into one sentence on stderr and exit code 2; so a message says what was wrong, where,
and what to do about it.
"""


class EsperError(Exception):
    """Base of all errors that Esper raises on purpose."""


class IllegalActionError(EsperError):
    """An action that the lifecycle's rules forbid in the seed's present state."""


class UnknownBlueprintError(EsperError):
    """A blueprint name that nobody registered."""


class SlotError(EsperError):
    """A growth slot that cannot be attached to, or probed on, the given model."""


class ConfigError(EsperError):
    """A configuration file, key or value that cannot be used."""


class CheckpointError(EsperError):
    """A checkpoint that is missing, damaged, foreign or of another shape than expected."""


class RunError(EsperError):
    """A run directory or run store that is missing, damaged, foreign or in use."""


class TaskError(EsperError):
    """A suite, instance or data set that does not exist or cannot be built."""
