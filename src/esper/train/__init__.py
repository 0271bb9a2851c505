"""Training and evaluating controllers: trainer, rollouts, workers, evaluation."""
