"""A file is the entry it should be, or it is known to be damaged: every byte of it counts."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from treadle_cache.disk.files import RealFiles, write_all
from treadle_cache.disk.format import Damaged, UnsupportedArray, decode, decode_head, encode
from treadle_cache.disk.testing import ROOT, WatchedFiles, digest_of, make_entry, same_entry
from treadle_cache.entries import Entry, EntryName

NAME = EntryName(kind="checkpoint", root=ROOT, digest=digest_of(7), parent=ROOT, num_tokens=41)

dtypes = st.sampled_from(
    "bool uint8 int8 uint16 int16 float16 uint32 int32 float32 uint64 int64 float64 complex64".split()
)
some_arrays = st.lists(
    dtypes.flatmap(lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0))),
    max_size=5,
).map(tuple)


def data_of(entry: Entry) -> bytes:
    return b"".join(buffer.tobytes() for buffer in encode(entry).buffers())


def reason(data: bytes, digest: bytes = NAME.digest) -> str:
    with pytest.raises(Damaged) as caught:
        decode(data, digest)
    return caught.value.reason


@given(some_arrays)
def test_any_arrays_come_back_equal(contents: tuple[np.ndarray, ...]) -> None:
    entry = Entry(name=NAME, arrays=contents)
    data = data_of(entry)
    assert len(data) == encode(entry).num_bytes == decode_head(data).num_bytes
    assert same_entry(decode(data, NAME.digest), entry)


@given(some_arrays)
def test_the_library_reads_the_same_arrays(contents: tuple[np.ndarray, ...]) -> None:
    found = safetensors.numpy.load(data_of(Entry(name=NAME, arrays=contents)))
    assert sorted(found) == [f"{number:04d}" for number in range(len(contents))]
    for number, array in enumerate(contents):
        assert found[f"{number:04d}"].dtype == array.dtype
        assert found[f"{number:04d}"].tobytes() == array.tobytes()


def test_arrays_are_views_that_nobody_can_write_to() -> None:
    data = data_of(make_entry(1))
    for array in decode(data, digest_of(1)).arrays:
        assert np.shares_memory(array, np.frombuffer(data, np.uint8))
        assert not array.flags.writeable
        assert array.flags.c_contiguous


def test_each_flipped_byte_is_noticed() -> None:
    data = data_of(make_entry(7, num_bytes=240))
    for place in range(len(data)):
        for mask in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[place] ^= mask
            assert reason(bytes(changed)) in ("checksum", "foreign", "version", "truncated")


def test_each_truncation_is_noticed_and_so_is_what_is_appended() -> None:
    data = data_of(make_entry(7, num_bytes=240))
    for size in range(len(data)):
        assert reason(data[:size]) == "truncated"
    assert reason(data + b"x") == "truncated"


def test_a_file_under_another_name_is_misplaced() -> None:
    assert reason(data_of(make_entry(8))) == "misplaced"


def test_foreign_files_and_other_versions_are_told_apart() -> None:
    theirs = safetensors.numpy.save({"weights": np.zeros(100, np.float32)})
    assert reason(theirs) == "foreign"
    assert reason(bytes(1000)) == "foreign"
    data = data_of(make_entry(7))
    assert reason(data.replace(b'"treadle":"1"', b'"treadle":"2"')) == "version"


def test_a_dtype_without_a_code_is_refused() -> None:
    for dtype in ("complex128", ">u2", "datetime64[s]"):
        with pytest.raises(UnsupportedArray):
            encode(Entry(name=NAME, arrays=(np.zeros(3, dtype),)))


@settings(deadline=None)
@given(some_arrays, st.integers(1, 40))
def test_writes_that_take_a_part_are_continued(
    tmp_path_factory: pytest.TempPathFactory, contents: tuple[np.ndarray, ...], most: int
) -> None:
    entry = Entry(name=NAME, arrays=contents)
    path: Path = tmp_path_factory.mktemp("partial") / "file"
    files = WatchedFiles(max_written=most)
    descriptor = files.create(path)
    write_all(files, descriptor, encode(entry).buffers())
    files.close(descriptor)
    assert RealFiles().read(path) == data_of(entry)
