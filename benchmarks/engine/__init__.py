"""Measures the batcher beside transformers on the same machine, in the same run.

`workload.json`: 32 requests as token ids of SmolLM2 (prompts of 20 to 400 tokens, 32 to 128 new ones), greedy, the end
of text ignored, all arriving at once.
"""
