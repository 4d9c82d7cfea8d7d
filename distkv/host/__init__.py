"""The CPU tier: host pages and their states, pinned memory, the layout of a page, and what copies it."""
