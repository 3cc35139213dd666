"""Chunks decoded in bulk are what Zarr decodes, or are left to Zarr."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd
from zarr import codecs as v3
from zarr.storage import MemoryStore

from effort import examples
from zarr_arrays import array_options, some_values
from zarr_manifests import decoding
from zarr_manifests.decoding import BulkDecoder
from zarr_manifests.errors import CorruptObjectError

# Zarr warns of types and codecs without a specification.
pytestmark = pytest.mark.filterwarnings(
    "ignore::zarr.errors.UnstableSpecificationWarning", "ignore::zarr.errors.ZarrUserWarning"
)

_FRAME = Zstd().encode(bytes(40))


class Written:
    """A small array, some chunks of which are there."""

    def __init__(self, array: Any, store: MemoryStore) -> None:
        self.array, self.store = array, store
        self.decoder = BulkDecoder.of(array.metadata.to_dict(), array.dtype)
        stored = array.shards or array.chunks
        grid = [range(-(-size // length)) for size, length in zip(array.shape, stored, strict=True)]
        self.keys = {
            at: f"a/{array.metadata.encode_chunk_key(at)}" for at in itertools.product(*grid)
        }

    def chunks(self) -> list[tuple[tuple[int, ...], bytes]]:
        held = self.store._store_dict
        return [(at, held[key].to_bytes()) for at, key in self.keys.items() if key in held]

    def empty(self, region: tuple[slice, ...]) -> np.ndarray:
        fill = self.array.fill_value
        fill = self.array.metadata.dtype.default_scalar() if fill is None else fill
        shape = tuple(part.stop - part.start for part in region)
        return np.full(shape, fill, self.array.dtype)


def _region(draw: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    lo = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(
        slice(at, draw(st.integers(at + 1, size))) for at, size in zip(lo, shape, strict=True)
    )


def _same(found: np.ndarray, expected: Any) -> bool:
    # Of an array without axes Zarr gives a scalar, which has the machine's byte order.
    expected = np.asarray(expected, found.dtype if not found.ndim else None)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


@st.composite
def arrays(draw: st.DrawFn, most_axes: int = 3) -> Written:
    store, options = MemoryStore(), draw(array_options(most_axes=most_axes))
    array = zarr.create_array(store, **options)
    values = some_values(draw, options["dtype"], array.shape)
    for _ in range(draw(st.integers(0, 3))):
        part = _region(draw, array.shape)
        array[part] = values[part]
    return Written(array, store)


@given(arrays(), st.data(), st.sampled_from([1, 2, 8192]))
def test_any_region_is_what_zarr_reads(written: Written, data: Any, batch: int) -> None:
    region = _region(data.draw, written.array.shape)
    chunks = data.draw(st.permutations(written.chunks()))
    out = written.empty(region)
    assert written.decoder is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_BATCH_CHUNKS", batch)
        assert written.decoder.decode(chunks, out, [part.start for part in region])
    assert _same(out, written.array[region])


@given(arrays(most_axes=2), st.data())
@settings(deadline=None, max_examples=examples(300))
def test_damaged_chunks_are_left_to_zarr(written: Written, data: Any) -> None:
    chunks = written.chunks()
    assume(chunks)
    number = data.draw(st.integers(0, len(chunks) - 1))
    at, whole = chunks[number]
    blosc = "blosc" in repr(written.array.metadata).lower()
    # Blosc reads behind the end of what is too short, and trusts what was changed.
    how = data.draw(st.sampled_from(["longer"] if blosc else ["shorter", "longer", "other"]))
    assume(written.array.ndim or how != "other")  # Zarr makes a scalar, whose bytes may differ
    where = data.draw(st.integers(0, len(whole) - 1))
    if how == "shorter":
        damaged = whole[:where]
    elif how == "longer":
        damaged = whole + data.draw(st.binary(min_size=1, max_size=20))
    else:
        damaged = bytearray(whole)
        damaged[where] ^= data.draw(st.integers(1, 255))
    buffer = zarr.core.buffer.default_buffer_prototype().buffer
    written.store._store_dict[written.keys[at]] = buffer.from_bytes(bytes(damaged))
    chunks[number] = (at, bytes(damaged))
    region = tuple(slice(0, size) for size in written.array.shape)
    out = written.empty(region)
    assert written.decoder is not None
    if written.decoder.decode(chunks, out, [0] * out.ndim):
        assert _same(out, written.array[region])


@pytest.mark.parametrize("frame", [_FRAME, _FRAME + _FRAME], ids=["one", "two"])
@pytest.mark.parametrize("tail", [b"(", _FRAME[:4], _FRAME[:-1]], ids=["1", "4", "most"])
def test_a_frame_that_is_cut_off_behind_another_is_left_to_zarr(frame: bytes, tail: bytes) -> None:
    assert decoding.decompressed("zstd", frame, 80) == bytes(40) * (len(frame) // len(_FRAME))
    assert decoding.decompressed("zstd", frame + tail, 120) is None


def test_damaged_text_without_axes_is_copied() -> None:
    out = np.empty((), "<U2")
    decoding.place(np.frombuffer(b"\xff" * 8, "<U2"), np.zeros((1, 0), np.int64), out, [])
    assert out.tobytes() == b"\xff" * 8


def test_blosc_is_not_given_less_than_it_believes() -> None:
    store = MemoryStore()
    array = zarr.create_array(
        store, name="a", shape=(4,), chunks=(4,), dtype="i4", compressors=v3.BloscCodec(clevel=0)
    )
    array[:] = 7
    written, out = Written(array, store), np.zeros(4, "i4")
    ((at, data),) = written.chunks()
    assert written.decoder is not None
    assert not written.decoder.decode([(at, data[:10])], out, (0,))
    with pytest.raises(CorruptObjectError, match="31 bytes"):
        written.decoder.decode([(at, data[:31])], out, (0,))


def test_bytes_that_their_checksum_does_not_fit_are_not_decoded() -> None:
    store = MemoryStore()
    codecs = {"compressors": v3.Crc32cCodec()}
    array = zarr.create_array(store, name="a", shape=(4,), chunks=(2,), dtype="i4", **codecs)
    array[:] = [1, 2, 3, 4]
    written, out = Written(array, store), np.zeros(4, "i4")
    (one, (at, data)), decoder = written.chunks(), written.decoder
    assert decoder is not None
    assert decoder.decode([one, (at, data)], out, (0,))
    assert out.tolist() == [1, 2, 3, 4]
    assert not decoder.decode([one, (at, bytes([data[0] ^ 1]) + data[1:])], out, (0,))
