"""The S2 API: streams, basins and access tokens."""
