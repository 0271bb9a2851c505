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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.engine.engine import GrowthConfig
    from esper.grower import Constrained, Decision, Grower, GrowerConfig, Metric, Refit, RunRecorder
    from esper.grower.validation import Validation
    from esper.growth.attach import attach
    from esper.growth.model import GrowingModel
    from esper.growth.persist import load, save
    from esper.ladders.ladder import ladder
    from esper.train.trainer import train_controller

__version__ = "0.3.0"
"""The version of this package, by the rules of semantic versioning."""

__all__ = [
    "Constrained",
    "Decision",
    "Grower",
    "GrowerConfig",
    "GrowingModel",
    "GrowthConfig",
    "Metric",
    "Refit",
    "RunRecorder",
    "Validation",
    "__version__",
    "attach",
    "ladder",
    "load",
    "save",
    "train_controller",
]
_MODULES = {
    "GrowthConfig": "esper.engine.engine",
    "GrowingModel": "esper.growth.model",
    "Validation": "esper.grower.validation",
    "attach": "esper.growth.attach",
    "ladder": "esper.ladders.ladder",
    "load": "esper.growth.persist",
    "save": "esper.growth.persist",
    "train_controller": "esper.train.trainer",
}
"""Modules of the names that `esper.grower` does not have."""


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `esper --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    return vars(import_module(_MODULES.get(name, "esper.grower")))[name]


def __dir__() -> list[str]:
    return __all__
