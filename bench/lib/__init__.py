"""What several benches use, and the parts of the large ones."""
