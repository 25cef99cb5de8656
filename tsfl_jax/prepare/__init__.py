"""From a `Config` to plain arrays and functions; nothing is compiled."""
