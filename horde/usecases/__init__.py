"""One function per thing a client, worker or admin can do; each composes the rooms below, its writes in one transaction."""
