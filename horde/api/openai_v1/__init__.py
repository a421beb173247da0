"""OpenAI's API: chat, completions and models, for whoever has one of its clients. Thin handlers over the same use cases."""
