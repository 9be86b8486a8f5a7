"""The client, for trio and asyncio. `_sync/` is made from these files by `make twin`."""
