"""Fakes and builders that several test packages share. Each fake is verified against the real thing."""
