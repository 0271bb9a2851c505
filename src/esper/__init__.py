"""Esper grows neural networks while they train.

```python
model = esper.attach(net, {"layer2": ["conv3x3", "squeeze_excite"]}, example_input=images[:2])
optimizer = torch.optim.AdamW(model.parameter_groups(lr=1e-3))
grower = esper.Grower(model, optimizer, evaluate=esper.Validation("classification", validation_batches))
for epoch in range(100):
    grower.step(train_loss=train_one_epoch(model, optimizer))
grower.finish()
plain = model.finalize()  # an ordinary nn.Module, without Esper
```

Names in ``__all__`` are public. docs/stability.md lists what else is, and what may change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.api import (
        Constrained,
        Decision,
        EpisodeConfig,
        Grower,
        GrowerConfig,
        GrowingModel,
        Metric,
        PrintDecisions,
        Refit,
        RunRecorder,
        Score,
        Spending,
        Validation,
        attach,
        branch,
        export,
        ladder,
        load,
        plan_ladder,
        save,
        warmup_stable_decay,
    )
    from esper.train.trainer import train_controller

__version__ = "0.3.0"
"""The version of this package, by the rules of semantic versioning."""

__all__ = [
    "Constrained",
    "Decision",
    "EpisodeConfig",
    "Grower",
    "GrowerConfig",
    "GrowingModel",
    "Metric",
    "PrintDecisions",
    "Refit",
    "RunRecorder",
    "Score",
    "Spending",
    "Validation",
    "__version__",
    "attach",
    "branch",
    "export",
    "ladder",
    "load",
    "plan_ladder",
    "save",
    "train_controller",
    "warmup_stable_decay",
]
_TRAINING = {"train_controller": "esper.train.trainer"}
"""Names that only training needs, with their modules: what a training loop of one model imports stays small."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `esper --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return vars(import_module(_TRAINING.get(name, "esper.api")))[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
