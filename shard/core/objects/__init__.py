"""Boxes of class object: how far the object store has their changes."""
