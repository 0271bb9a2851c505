"""Results with planted scores."""

from collections.abc import Mapping

import numpy as np

from esper.tasks.suite import Split
from esper.train.results import Result

FAMILIES = ("bott", "order", "plain")


def planted(
    means: Mapping[str, float], count: int = 60, noise: float = 0.02, split: Split = "heldout", stream: int = 0
) -> list[Result]:
    """Controllers with these mean scores on the same instances, which differ by family; noise is each one's own."""
    ease, rng = np.random.default_rng(0).normal(0, 0.1, count), np.random.default_rng((1, stream))
    return [
        Result(
            controller=name,
            instance=f"{FAMILIES[index % 3]}/only/{index}",
            family=FAMILIES[index % 3],
            variant="only",
            score=float(mean + ease[index] + rng.normal(0, noise)) if noise else float(mean + ease[index]),
            test_accuracy=float(mean + 0.05),
            added_parameters=0 if name == "none" else 100 + index,
            host_parameters=400,
            split=split,
        )
        for name, mean in means.items()
        for index in range(count)
    ]
