"""Training, evaluating and comparing controllers, and the run directories they leave behind."""
