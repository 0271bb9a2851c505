"""What `esper doctor` finds out about an installation."""
