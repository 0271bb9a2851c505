"""What people look at while networks grow: the dashboard (extra ``ui``), printed lines, progress."""
