"""Who decides: observations and controllers."""
