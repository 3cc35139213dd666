"""Which leaves an array is split into, and which manifest holds each leaf."""
