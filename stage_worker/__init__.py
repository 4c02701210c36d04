"""Runs one layer range on one device in one process: tiers, walk, model families."""
