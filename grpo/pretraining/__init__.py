"""Pretraining of small models on generated documents."""
