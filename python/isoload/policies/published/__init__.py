"""What others published, re-implemented to compare with: their rules, faults and drawn replicas included."""
