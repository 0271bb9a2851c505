"""Training and evaluating controllers: trainer, rollouts, workers, evaluation."""

from esper.extras import EXTRAS, require_extra

require_extra("train", "esper.train", *EXTRAS["train"])
