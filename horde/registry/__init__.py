"""Who serves what: workers and their check-ins, models as the workers announce them."""
