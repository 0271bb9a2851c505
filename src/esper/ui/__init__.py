"""What people look at: the live terminal view and the report."""
