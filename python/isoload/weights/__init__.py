"""Where expert weights lie and how they move: layout, storage, migration, borrowing, and their gradients."""
