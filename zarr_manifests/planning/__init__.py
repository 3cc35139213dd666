"""Decisions as pure functions: values in, frozen plans out, no I/O.

- Chunk tables: `merge`, `regions`, `tables`.
- Leaves and manifests: `leaves`, `packing`.
- Commits that meet: `components`, `conflict`, `appends`.
- What is compacted, expired or deleted: `garbage`, `changes`.
- Values in chunks: `meaning`, `measure`, `where`, `skipping`.
- Tasks of reads and writes: `scan`.
"""
