"""What runs by the clock in every broker: heartbeat, passes over what is due, folds. Two leaders at once do no harm."""
