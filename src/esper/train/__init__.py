"""Training and evaluating controllers: trainer, rollouts, workers, evaluation."""

from esper.extras import TRAIN, require_extra

require_extra("train", "esper.train", *TRAIN)
