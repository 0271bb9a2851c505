"""What may happen to a seed: stages, operations, gates, the state table and legal-action masks."""
