"""Servers of object stores, for repositories that are served from there."""

from s3_server import server_named

__all__ = ["server_named"]
