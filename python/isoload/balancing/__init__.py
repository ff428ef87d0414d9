"""From the router's top-k ids to slots: count, gather, plan, share, route."""
