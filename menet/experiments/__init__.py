"""Every table and figure of the paper: its claims, what must run to measure them, and what runs it."""
