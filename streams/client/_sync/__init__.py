# Written by `make twin` from ../_async/__init__.py. Do not edit.
"""The client, for plain code and threads."""
