"""Expert weights: layout, storage, checkpoints, migration, borrowing, and their gradients."""
