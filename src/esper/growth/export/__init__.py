"""Plain models as files that need no Esper, each checked by running it in a process that has none."""

from esper.growth.export.exporting import export
from esper.growth.export.formats import Format

__all__ = ["Format", "export"]
