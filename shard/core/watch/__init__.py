"""Readers that stay: pages of a box for a subscription, and sessions."""
