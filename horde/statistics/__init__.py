"""Statistics: totals, abort statistics and speeds, folded from events; reads add what is not folded yet."""
