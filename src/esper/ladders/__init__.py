"""`esper.ladder`: models of several sizes from one training, in which the model grows deeper in place."""
