"""The worker: holds a model and no state that must last; reaches a broker over HTTP only."""
