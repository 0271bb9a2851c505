"""The lifecycle of seeds as a pure state machine: stages, operations, gates, state table and masks of legal actions."""
