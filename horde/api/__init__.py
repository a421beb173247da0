"""The HTTP side: wire shapes and thin handlers. A handler parses, calls one use case, and answers."""
