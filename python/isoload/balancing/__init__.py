"""From a router's ids to slots: count, gather, plan, share, route."""
