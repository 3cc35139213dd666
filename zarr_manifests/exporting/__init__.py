"""Exports: a snapshot in formats that other software reads, as copies or references."""
