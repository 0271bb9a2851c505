"""`esper.ladder`: models of several sizes from one training, during which the model grows deeper in place."""
