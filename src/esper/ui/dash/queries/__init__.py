"""What each view of the dashboard needs of a run, as plain JSON values."""
