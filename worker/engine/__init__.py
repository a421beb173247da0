"""Text generation engines behind one small interface; nothing here knows of HTTP, brokers or jobs."""
