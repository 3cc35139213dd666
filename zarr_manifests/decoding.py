"""Decoding many chunks of one array at once, straight into an array of cells.

Zarr decodes chunk by chunk, which costs about 300 µs a chunk, however small it is. Here a batch of
chunks passes each codec together, is joined to one buffer, and is placed with a few assignments.
Supported are the codecs that most arrays have: `bytes`, `transpose`, `zstd`, `blosc`, `gzip`,
`zlib`, `shuffle`, `crc32c` and `sharding_indexed`, and their equals in Zarr's format 2.

Invariants:

- The values are those that Zarr decodes. In doubt nothing is decoded. An array with another codec
  has no decoder. For a chunk that is not exactly what its codecs make, `decode` returns False; the
  caller then reads with Zarr, which decodes it or raises the precise error.
- However much a chunk claims or would expand to, no more is decompressed than its array says.
"""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import batched, pairwise, product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import zstandard
from msgspec import Struct
from numcodecs import blosc

from zarr_manifests.errors import (
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
    plain_text,
)
from zarr_manifests.grid import Coords, IndexArray
from zarr_manifests.ids import crc32c
from zarr_manifests.keys import absolute
from zarr_manifests.runtime import quiet

if TYPE_CHECKING:
    import zarr

type Chunks = Sequence[bytes] | npt.NDArray[np.uint8]
"""Bytes of chunks; those of one length may be the rows of an array."""
type _Stage = Callable[[Chunks], Chunks]

_BATCH_BYTES: Final = 1024**2
_BATCH_CHUNKS: Final = 8 * 1024
_CRC_BYTES: Final = 4
_BLOSC_HEADER_BYTES: Final = 16
_ABSENT: Final = 2**64 - 1
_ZLIB, _GZIP = 15, 31
_TOO_LARGE: Final = "a chunk decompresses to more than {:,} bytes, and has no room for them"
_FAILURES: Final = (ValueError, RuntimeError, zlib.error, zstandard.ZstdError)


_REFUSALS: Final = (
    ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError,
    ValueError, zlib.error,
)  # fmt: skip
"""What Zarr and its codecs raise for documents and chunks that they cannot read."""


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn what Zarr raises for an array that it cannot open or decode into one error.

    Raises
    ------
    InvalidArgumentError
        If it raises anything but an error of this package.
    """
    try:
        yield
    except ManifestsError:  # which are built-in errors, too
        raise
    except _REFUSALS as error:
        raise InvalidArgumentError(
            f"{absolute(path)} cannot be decoded: {plain_text(error)}"
        ) from error


class InDoubtError(ValueError):
    """Only Zarr can say what it is: a chunk is not exactly what the codecs make."""


class _TooLargeError(InDoubtError):
    """A chunk decompresses to more than it has room for."""


class _UnknownError(ValueError):
    """A codec, or a way to use it, that is not known here."""


class _Shards(Struct, frozen=True):
    """Where the inner chunks of a shard are.

    Parameters
    ----------
    counts : tuple of int
        Inner chunks of a shard, by axis.
    index_at_start : bool
        Whether the index comes before the inner chunks, not after them.
    has_checksum : bool
        Whether the index ends with its crc32c.
    """

    counts: Coords
    index_at_start: bool
    has_checksum: bool

    def open(self, coords: IndexArray, shards: Chunks) -> tuple[IndexArray, Chunks]:
        """The coordinates and bytes of the inner chunks that are there.

        Raises
        ------
        InDoubtError
            If a shard is not exactly what Zarr writes.
        """
        indexes = [self._index(shard) for shard in shards]  # first, as it has to be there wholly
        inner = np.indices(self.counts).reshape(len(self.counts), -1).T
        places, parts = [], []
        for corner, shard, index in zip(coords * self.counts, shards, indexes, strict=True):
            found = np.flatnonzero((index != _ABSENT).any(axis=1))
            start, length = index[found].astype(np.int64).T
            # A start or length that is absurd becomes negative or too large.
            if (start < 0).any() or (length < 0).any() or (start + length > len(shard)).any():
                raise InDoubtError
            if length.sum() > len(shard):  # they overlap, and each would be copied
                raise InDoubtError
            if len(shards) == 1 and len(found) and (length == length[0]).all():
                order = np.argsort(start)  # as they are stored
                at = start[order]
                if length[0] and (np.diff(at) == length[0]).all():
                    data = np.frombuffer(shard, np.uint8)[at[0] : at[-1] + length[0]]
                    return corner + inner[found[order]], data.reshape(len(found), -1)
            ends = zip(start.tolist(), (start + length).tolist(), strict=True)
            parts += [shard[lo:hi] for lo, hi in ends]
            places.append(corner + inner[found])
        return np.concatenate(places), parts

    def _index(self, shard: bytes) -> npt.NDArray[np.uint64]:
        size = 16 * math.prod(self.counts) + _CRC_BYTES * self.has_checksum
        data = shard[:size] if self.index_at_start else shard[max(len(shard) - size, 0) :]
        if len(data) != size:
            raise InDoubtError
        if self.has_checksum:
            (data,) = _checked([data])
        return np.frombuffer(data, "<u8").reshape(-1, 2)


class BulkDecoder(Struct, frozen=True):
    """Decodes stored chunks of one array. Made by `BulkDecoder.of`.

    Parameters
    ----------
    chunk_shape : tuple of int
        Cells of a chunk; of an inner chunk if the array is sharded.
    stored : numpy.dtype
        Type of the values in the decoded bytes, with their byte order.
    order : tuple of int
        The axes of the array, in the order in which chunks have them.
    stages : tuple of callable
        What undoes the codecs, from the stored bytes on.
    shards : _Shards, optional
        How chunks lie in shards, if they do.
    """

    chunk_shape: Coords
    stored: np.dtype[Any]
    order: Coords
    stages: tuple[_Stage, ...]
    shards: _Shards | None = None

    @staticmethod
    def of(document: Mapping[str, Any], dtype: np.dtype[Any]) -> BulkDecoder | None:
        r"""The decoder of an array; None if chunks have to be decoded by Zarr.

        Parameters
        ----------
        document : mapping
            The array's metadata document, of format 2 or 3.
        dtype : numpy.dtype
            The type of its values, as Zarr gives it.

        Examples
        --------
        >>> import numpy as np
        >>> from zarr_manifests.decoding import BulkDecoder
        >>> grid = {"name": "regular", "configuration": {"chunk_shape": [2]}}
        >>> bytes_codec = {"name": "bytes", "configuration": {"endian": "big"}}
        >>> document = {"zarr_format": 3, "chunk_grid": grid, "codecs": [bytes_codec]}
        >>> decoder = BulkDecoder.of(document, np.dtype("i2"))
        >>> values = np.zeros(5, "i2")
        >>> decoder.decode([((4,), b"\0\7\0\0"), ((3,), b"\0\1\0\2")], values, (5,))
        True
        >>> values.tolist()
        [0, 1, 2, 7, 0]
        """
        if dtype.kind not in "biufcmMSUV" or dtype.hasobject or dtype.names or not dtype.itemsize:
            return None
        try:
            made = _of_v2 if document["zarr_format"] == 2 else _of_v3
            return made(document, dtype)
        except (_UnknownError, AttributeError, LookupError, TypeError, ValueError):
            return None  # in doubt, as of a document that Zarr refuses

    def decode(
        self, chunks: Iterable[tuple[Coords, bytes]], out: npt.NDArray[Any], lo: Sequence[int]
    ) -> bool:
        """Decode chunks and place the cells that `out` has room for.

        Chunks are taken from the iterable in batches, so few are in memory at a time.

        Parameters
        ----------
        chunks : iterable of (coordinates, bytes)
            Stored chunks, which are shards if the array is sharded.
        out : array
            The cells of the array from `lo` on. Cells without a chunk are left as they are.
        lo : sequence of int
            The array's position of the first cell of `out`.

        Returns
        -------
        bool
            Whether all of it could be decoded; if not, what is in `out` is of no use.

        Raises
        ------
        CorruptObjectError
            If a chunk is shorter than it says, and Zarr would not notice.
        """
        for batch in batched(chunks, self.batch_chunks):
            coords = np.array([at for at, _ in batch], np.int64).reshape(len(batch), -1)
            data: Chunks = [data for _, data in batch]
            try:
                if self.shards is not None:
                    coords, data = self.shards.open(coords, data)
                values = self.values(data)
            except InDoubtError:
                return False
            if len(values):
                place(values, coords, out, lo)
        return True

    def values(self, chunks: Chunks) -> npt.NDArray[Any]:
        """The values of chunks, not of shards, of shape (chunks, *chunk shape).

        Raises
        ------
        InDoubtError
            If a chunk is not exactly what the codecs make.
        CorruptObjectError
            If a chunk is shorter than it says, and Zarr would not notice.
        """
        try:
            for undo in self.stages:
                chunks = undo(chunks)
        except _FAILURES as error:
            raise InDoubtError from error
        shape = tuple(self.chunk_shape[axis] for axis in self.order)
        nbytes = math.prod(shape) * self.stored.itemsize
        if _lengths(chunks) - {nbytes}:
            raise InDoubtError
        joined = np.frombuffer(_joined(chunks), self.stored).reshape(len(chunks), *shape)
        back = np.argsort(self.order)
        return joined.transpose(0, *(back + 1).tolist())

    @property
    def batch_chunks(self) -> int:
        """How many chunks are decoded at a time: a megabyte, which a processor's cache holds."""
        inner = 1 if self.shards is None else math.prod(self.shards.counts)
        nbytes = inner * math.prod(self.chunk_shape) * self.stored.itemsize
        return min(max(_BATCH_BYTES // max(nbytes, 1), 1), _BATCH_CHUNKS)

    def is_plain(self, dtype: np.dtype[Any]) -> bool:
        """Whether stored chunks have the bytes of an array of this type in C order."""
        ordered = self.order == tuple(range(len(self.order)))
        return not self.stages and self.shards is None and ordered and self.stored == dtype


# --- from documents to decoders --------------------------------------------------------------


def _of_v2(document: Mapping[str, Any], dtype: np.dtype[Any]) -> BulkDecoder:
    shape = tuple(document["chunks"])
    codecs = [*(document.get("filters") or ()), document.get("compressor")]
    # Named as in format 3, since a codec of the same name may work in another way there.
    used = [(f"numcodecs.{codec['id']}", codec) for codec in codecs if codec is not None]
    axes = range(len(shape))
    order = tuple(reversed(axes) if document["order"] == "F" else axes)
    return BulkDecoder(shape, dtype, order, _stages(used, shape, dtype))


def _of_v3(document: Mapping[str, Any], dtype: np.dtype[Any]) -> BulkDecoder:
    grid = document["chunk_grid"]
    if grid["name"] != "regular" or document.get("storage_transformers"):
        raise _UnknownError
    shape = tuple(grid["configuration"]["chunk_shape"])
    codecs = _named(document["codecs"])
    name, options = codecs[0]
    if name != "sharding_indexed":
        return _of_codecs(codecs, shape, dtype)
    inner = tuple(options["chunk_shape"])
    index = _named(options["index_codecs"])
    whole = len(codecs) == 1 and not any(n % m for n, m in zip(shape, inner, strict=True))
    known = [("bytes", {"endian": "little"}), ("crc32c", {})]
    if not whole or index not in (known, known[:1]):
        raise _UnknownError
    counts = tuple(n // m for n, m in zip(shape, inner, strict=True))
    at_start = options.get("index_location", "end") == "start"
    made = _of_codecs(_named(options["codecs"]), inner, dtype)
    shards = _Shards(counts, at_start, len(index) == len(known))
    return BulkDecoder(inner, made.stored, made.order, made.stages, shards)


type _Named = list[tuple[str, Mapping[str, Any]]]


def _named(codecs: Sequence[str | Mapping[str, Any]]) -> _Named:
    return [
        (each, {}) if isinstance(each, str) else (each["name"], each.get("configuration") or {})
        for each in codecs
    ]


def _of_codecs(codecs: _Named, shape: Coords, dtype: np.dtype[Any]) -> BulkDecoder:
    """The decoder of a chain of array codecs, `bytes` and bytes codecs."""
    order = tuple(range(len(shape)))
    for number, (name, options) in enumerate(codecs):
        if name == "transpose":
            order = tuple(order[axis] for axis in options["order"])
        elif name == "bytes":
            endian = options.get("endian")
            if endian is None and dtype.newbyteorder("S") != dtype:
                raise _UnknownError
            stored = dtype if endian is None else dtype.newbyteorder(endian)
            return BulkDecoder(shape, stored, order, _stages(codecs[number + 1 :], shape, dtype))
        else:
            break
    raise _UnknownError


def _stages(codecs: _Named, shape: Coords, dtype: np.dtype[Any]) -> tuple[_Stage, ...]:
    """What undoes the bytes codecs, in the order of decoding."""
    size: int | None = math.prod(shape) * dtype.itemsize
    stages: list[_Stage] = []
    for name, options in codecs:
        if size is None and name != "crc32c":
            raise _UnknownError  # what a second compressor makes has no known size
        if name == "crc32c":
            stages.insert(0, _checked)
            size = None if size is None else size + _CRC_BYTES
        elif name == "numcodecs.shuffle" and size is not None:
            width = options.get("elementsize", 0)
            if width < 1 or size % width:
                raise _UnknownError
            stages.insert(0, partial(_unshuffled, size=size, width=width))
        elif name.removeprefix("numcodecs.") in _COMPRESSORS:
            undo = _COMPRESSORS[name.removeprefix("numcodecs.")]
            stages.insert(0, partial(undo, size=size))
            size = None
        else:
            raise _UnknownError
    return tuple(stages)


# --- codecs ----------------------------------------------------------------------------------


def _joined(chunks: Chunks) -> Any:
    """The bytes of all chunks, one after another."""
    if isinstance(chunks, np.ndarray) and chunks.flags.c_contiguous:
        return chunks.reshape(-1)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _lengths(chunks: Chunks) -> set[int]:
    """How long the chunks are."""
    return {chunks.shape[1]} if isinstance(chunks, np.ndarray) else {*map(len, chunks)}


def _checked(chunks: Chunks) -> Chunks:
    """Compare and remove the checksums."""
    found = [data[:-_CRC_BYTES] for data in chunks]
    sums = np.array([crc32c(data) for data in found], "<u4").tobytes()
    if sums != b"".join([data[-_CRC_BYTES:] for data in chunks]):
        raise InDoubtError
    return found


def _unshuffled(chunks: Chunks, *, size: int, width: int) -> Chunks:
    if _lengths(chunks) - {size}:
        raise InDoubtError
    joined = np.frombuffer(_joined(chunks), np.uint8).reshape(len(chunks), width, -1)
    straight = joined.transpose(0, 2, 1).tobytes()
    return [straight[at : at + size] for at in range(0, len(straight), size)]


def _limit(size: int, most: int) -> None:
    if size > most:
        raise _TooLargeError(_TOO_LARGE.format(most))


def _unzstd(chunks: Chunks, *, size: int) -> Chunks:
    # A frame says how large its content is, and so much is allocated.
    said = {*map(zstandard.frame_content_size, chunks)}
    _limit(max(said, default=0), size)
    with suppress(zstandard.ZstdError):  # as of several frames, of which only the first was asked
        if min(said, default=1) > 0:
            decompress = zstandard.ZstdDecompressor().decompress
            return [decompress(data, allow_extra_data=False) for data in chunks]
    # For a frame that does not say it, up to 128 MB are allocated, which must not be kept.
    opened = partial(zstandard.ZstdDecompressor().stream_reader, read_across_frames=True)
    found = [opened(data).read(size + 1) for data in chunks]
    _limit(max(map(len, found), default=0), size)
    for rest in chunks:  # the reader does not say if the last frame is cut off
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            frame.decompress(rest)
            if not frame.eof:
                raise InDoubtError
            rest = frame.unused_data
    return found


def _unblosc(chunks: Chunks, *, size: int) -> Chunks:
    for data in chunks:
        said, stored = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
        if len(data) < _BLOSC_HEADER_BYTES:
            raise InDoubtError
        _limit(said, size)
        if stored > len(data):
            # Blosc believes its header, and would read what lies behind the chunk in memory.
            raise CorruptObjectError(
                f"a chunk compressed with blosc has {len(data)} bytes, but says {stored}"
            )
    return [blosc.decompress(data) for data in chunks]


def _inflated(chunks: Chunks, *, size: int, window: int) -> Chunks:
    found = []
    for data in chunks:
        stream = zlib.decompressobj(window)
        # One byte more than due, so that the end is reached, and a longer stream noticed.
        found.append(stream.decompress(data, size + 1))
        _limit(len(found[-1]), size)
        if not stream.eof or stream.unused_data:
            raise InDoubtError
    return found


_COMPRESSORS: Final[Mapping[str, Callable[..., Chunks]]] = {
    "zstd": _unzstd,
    "blosc": _unblosc,
    "gzip": partial(_inflated, window=_GZIP),
    "zlib": partial(_inflated, window=_ZLIB),
}


def decompressed(name: str, data: Any, most: int) -> bytes | None:
    """What a codec of Zarr makes of bytes; None if it is not known, or raises without having more.

    Parameters
    ----------
    name : str
        Name of the codec. Known are `"zstd"`, `"blosc"`, `"gzip"` and `"zlib"`.
    data : bytes-like
        The compressed bytes.
    most : int
        How many bytes they may become.

    Raises
    ------
    CorruptObjectError
        If they would become more, or are fewer than they say.

    Examples
    --------
    >>> import zlib
    >>> from zarr_manifests.decoding import decompressed
    >>> decompressed("zlib", zlib.compress(b"abc"), most=3)
    b'abc'
    """
    if name not in _COMPRESSORS:
        return None
    try:
        (found,) = _COMPRESSORS[name]([data], size=most)
    except _TooLargeError as error:
        raise CorruptObjectError(str(error)) from error
    except zstandard.ZstdError as error:  # a later frame may claim any size, which Zarr believes
        raise RuntimeError(f"Zstd decompression error: {error}") from error
    except _FAILURES:
        if name != "gzip":
            return None
        found = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)  # perhaps of several members
        if len(found) > most:
            raise CorruptObjectError(_TOO_LARGE.format(most)) from None
    return bytes(found)


# --- placing ---------------------------------------------------------------------------------


def place(
    values: npt.NDArray[Any], coords: IndexArray, out: npt.NDArray[Any], lo: Sequence[int]
) -> None:
    """Copy the cells of chunks to an array that begins at the cell `lo`.

    Parameters
    ----------
    values : array
        The chunks, of shape (chunks, *chunk shape).
    coords : int64[n, ndim]
        Their coordinates.
    out : array
        Where the cells go that it has room for.
    lo : sequence of int
        The position of its first cell.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.decoding import place
    >>> out = np.zeros(4, int)
    >>> place(np.array([[1, 2], [5, 6]]), np.array([[0], [2]]), out, [1])
    >>> out.tolist()
    [2, 0, 0, 5]
    """
    if not out.ndim:
        out[()] = values[-1, ...]  # a scalar of damaged text cannot be made
        return
    for rows, part, tiles, at in _pieces(values.shape[1:], coords, out, lo):
        cells = values[(slice(None), *part)]
        if at is None:
            tiles[...] = cells.reshape(tiles.shape)
        else:
            tiles[at] = cells if rows is None else cells[rows]


def gather(
    values: npt.NDArray[Any], coords: IndexArray, cells: npt.NDArray[Any], lo: Sequence[int]
) -> None:
    """Copy the cells of an array that begins at the cell `lo` to chunks.

    Parameters
    ----------
    values : array
        The chunks, of shape (chunks, *chunk shape). Cells that `cells` does not have stay.
    coords : int64[n, ndim]
        Their coordinates.
    cells : array
        Where the cells come from.
    lo : sequence of int
        The position of its first cell.

    Examples
    --------
    >>> import numpy as np
    >>> from zarr_manifests.decoding import gather
    >>> values = np.zeros((2, 2), int)
    >>> gather(values, np.array([[0], [2]]), np.array([1, 2, 3, 4]), [1])
    >>> values.tolist()
    [[0, 1], [4, 0]]
    """
    if not cells.ndim:
        values[...] = cells
        return
    for rows, part, tiles, at in _pieces(values.shape[1:], coords, cells, lo):
        if at is None:
            whole = values[(slice(None), *part)]
            whole.reshape(tiles.shape)[...] = tiles
        else:
            values[(slice(None) if rows is None else rows, *part)] = tiles[at]


type _Piece = tuple[
    IndexArray | None, tuple[slice, ...], npt.NDArray[Any], tuple[IndexArray, ...] | None
]


def _pieces(
    shape: Coords, coords: IndexArray, cells: npt.NDArray[Any], lo: Sequence[int]
) -> Iterator[_Piece]:
    """Chunks of which the same part lies in the cells.

    Each with the rows of these chunks, or None for all; the part; a view of the cells by chunk; and
    where the chunks are in it, or None if they are all of it in its order.
    """
    box = np.stack([coords.min(axis=0), coords.max(axis=0) + 1], axis=1).tolist()
    axes = [
        list(_sections(first, stop, length, start, start + size))
        for (first, stop), length, start, size in zip(box, shape, lo, cells.shape, strict=True)
    ]
    for sections in product(*axes):
        chunks, part, inside = zip(*sections, strict=True)
        (first, stop), view = np.array(chunks).T, cells[inside]
        here = ((coords >= first) & (coords < stop)).all(axis=1)
        rows = None if here.all() else np.flatnonzero(here)
        at = coords - first if rows is None else coords[rows] - first
        grid = (stop - first).tolist()
        lengths = [each.stop - each.start for each in part]
        # Splitting axes gives a view, whatever the strides.
        split = [n for pair in zip(grid, lengths, strict=True) for n in pair]
        tiles = view.reshape(split)
        tiles = tiles.transpose(*range(0, len(split), 2), *range(1, len(split), 2))
        number = len(at)
        every = rows is None and number == math.prod(grid)
        if every and (np.ravel_multi_index(at.T, grid) == np.arange(number)).all():
            yield None, part, tiles, None
        else:
            yield rows, part, tiles, tuple(at.T)


def _sections(
    first: int, stop: int, length: int, lo: int, hi: int
) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    """Cut the chunks `first` to `stop` by what of them lies in the cells `lo` to `hi`.

    Each with a half-open range of chunks, the cells of each chunk, and where these are in the
    output. Only the chunks at both ends can lie in them partly.
    """
    first, stop = max(first, lo // length), min(stop, -(-hi // length))
    whole = max(first, -(-lo // length)), min(stop, hi // length)
    if first >= stop:
        return
    for start, end in pairwise(sorted({first, stop, *(n for n in whole if first < n < stop)})):
        cells = slice(max(start * length, lo) - lo, min(end * length, hi) - lo)
        part = slice(max(lo - start * length, 0), min(hi - (end - 1) * length, length))
        yield (start, end), part, cells


# --- values as xarray decodes them ---------------------------------------------------------------


REAL_CALENDARS: Final = ("standard", "gregorian", "proleptic_gregorian")
"""Calendars that agree since 1582."""


def packing_of(attributes: Mapping[str, Any]) -> tuple[float, float]:
    """What stored numbers are multiplied by, and what is added then.

    Raises
    ------
    TypeError, ValueError
        If these are no numbers.
    """
    both = attributes.get("scale_factor"), attributes.get("add_offset")
    scale, offset = (None if one is None else float(np.asarray(one).item()) for one in both)
    return 1.0 if scale is None else scale, offset or 0.0


def meaning_of_bounds(name: str, there: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return units and calendar that a bounds array takes over from its times.

    Parameters
    ----------
    name : str
        Name of the array.
    there : iterable of mapping
        The attributes of the arrays in its group.
    """
    for attributes in there:
        if attributes.get("bounds") == name and " since " in str(attributes.get("units")):
            return {key: attributes[key] for key in ("units", "calendar") if key in attributes}
    return {}


def decoded_by(array: zarr.Array[Any]) -> dict[str, Any]:
    """The attributes of an array as xarray sees them when it decodes the values."""
    from xarray.backends.zarr import FillValueCoder

    found: dict[str, Any] = dict(array.attrs)
    found.pop("_ARRAY_DIMENSIONS", None)
    if array.metadata.zarr_format == 2 and array.fill_value is not None:
        found["_FillValue"] = array.fill_value
    elif array.metadata.zarr_format == 3 and "_FillValue" in found:
        found["_FillValue"] = FillValueCoder.decode(found["_FillValue"], array.dtype)
    return found


def decoded(
    what: str,
    stored: npt.NDArray[Any],
    attributes: Mapping[str, Any],
    *,
    decode_times: bool = True,
) -> npt.NDArray[Any]:
    """Stored values of any shape as xarray decodes those of a variable with these attributes.

    Raises
    ------
    InvalidArgumentError
        If xarray cannot decode them.
    """
    import xarray as xr

    values = stored.reshape(stored.shape or (1,))
    dims = [f"axis {number}" for number in range(values.ndim)]
    how: Any = {"decode_via_units": False, "decode_via_dtype": True}
    with quiet():  # opening the data by xarray gives the same warnings
        try:
            found = xr.conventions.decode_cf_variable(
                what,
                xr.Variable(dims, values, attributes),
                stack_char_dim=False,  # a character is a cell
                decode_times=xr.coders.CFDatetimeCoder(time_unit="us") if decode_times else False,
                decode_timedelta=xr.coders.CFTimedeltaCoder(time_unit="us", **how),
            )
            return found.to_numpy().reshape(stored.shape)
        except (ValueError, OverflowError, TypeError) as error:
            raise InvalidArgumentError(
                f"{what} cannot be decoded: {str(error).partition('. Try opening')[0]}. Correct "
                "its attributes; chunks_where and Spark read times as numbers by decode_times=False"
            ) from error
