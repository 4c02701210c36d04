"""Carries: messages, sockets, shared memory and hand-off slots. Knows no model."""
