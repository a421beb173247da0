"""Who may ask for what: keys and roles, limits, and the checks that make an order a request."""
