"""Engines that sample completions: token ids in, token ids out."""
