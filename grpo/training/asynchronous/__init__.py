"""GRPO with generator, scorer and learner apart, each a Ray actor.

:mod:`.loop` is the algorithm; :mod:`.actors` is what runs elsewhere, :mod:`.remote` how the loop speaks to it, :mod:`.worker`
what happens when it dies, :mod:`.replay` the buffer, and :mod:`.start` puts them together.
"""
