"""Engines: how completions are sampled. Token ids go in and token ids come out."""
