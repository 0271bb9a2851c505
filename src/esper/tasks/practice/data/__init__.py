"""The data sets of the tasks, each read from one place and split once for all."""
