"""API keys (`keys`), what they allow (`grants`), and how much (`key_limits`, `rates`)."""
