"""Split federated learning with gradient aggregation."""
