"""Where models come from: a hub name, a local directory, or the demo model that the package index carries."""
