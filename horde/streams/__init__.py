"""Output of attached requests to the clients that wait for it: read from the database, handed out in this process."""
