"""Routers: the registry, the sender at a source box and the receiver at a destination box."""
