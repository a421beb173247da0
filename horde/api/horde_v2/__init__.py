"""AI Horde's API v2 on the wire: shapes, routes, error dialect."""
