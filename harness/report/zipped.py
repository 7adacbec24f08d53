"""Files as one zip with their checksums: packed into equal bytes, and unpacked as data within bounds."""

import hashlib
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping

from harness.records.store import NAME
from impl.errors import InputError

BEGINNING = (1980, 1, 1, 0, 0, 0)
"""Earliest time that a zip can hold, given to all files so that equal archives have equal bytes."""
SUMS = "SHA256SUMS"
MOST_PACKED, MOST_UNPACKED, MOST_FILES = 2**27, 2**29, 2**16
"""Most bytes and files of an archive that is read: over 16 times those of the largest committed experiment."""
ENTRY = b"PK\x01\x02"
"""Beginning of each file's entry in a zip's list of files."""
NO_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError)
"""Errors of `zipfile` on bytes that are no whole zip, or one of a kind that it cannot read."""


def pack(name: str, inside: Mapping[str, bytes]) -> bytes:
    """Return a zip of the files below one folder, with their checksums in the format of `sha256sum --check`."""
    sums = "".join(f"{hashlib.sha256(inside[path]).hexdigest()}  {path}\n" for path in sorted(inside))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, data in sorted({**inside, SUMS: sums.encode()}.items()):
            info = zipfile.ZipInfo(f"{name}/{path}", BEGINNING)
            info.compress_type, info.create_system, info.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(info, data)
    return content.getvalue()


def unpack(content: bytes) -> tuple[str, dict[str, bytes]]:
    """Return the name and the files of a zip that `pack` made, by their paths below its folder; nothing is written.

    Raises:
        InputError: it is none, is too large, has anything but plain files of such a folder, or a checksum differs.
    """
    if content.count(ENTRY) > MOST_FILES:
        raise InputError(f"more than {MOST_FILES:,} files")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            inside = _read(archive)
    except InputError:
        raise
    except NO_ZIP as error:
        raise InputError(f"no whole zip ({' '.join(str(error).split()) or type(error).__name__:.200})") from None
    tops = sorted({path.partition("/")[0] for path in inside})
    if len(tops) != 1:
        raise InputError(f"files below {', '.join(tops[:3]) or 'no folder'}, not below one folder")
    below = {path.partition("/")[2]: data for path, data in inside.items()}
    _require_sums(below)
    return tops[0], below


def _read(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """Return the files of an open zip; their sizes are bounded as declared, and again as they are unpacked."""
    inside, left, infos = dict[str, bytes](), MOST_UNPACKED, archive.infolist()
    too_large = InputError(f"more than {MOST_UNPACKED:,} bytes when unpacked")
    for info in infos:
        _require_plain(info)
    if sum(info.file_size for info in infos) > left:
        raise too_large
    for info in infos:
        if info.filename in inside:
            raise InputError(f"{info.filename} is in it twice")
        with archive.open(info) as file:
            inside[info.filename] = data = file.read(left + 1)
        if (left := left - len(data)) < 0:
            raise too_large
    return inside


def _require_plain(info: zipfile.ZipInfo) -> None:
    """Check that an entry is a plain file, packed as by `pack`, with a path that leads below a folder."""
    parts = info.filename.split("/")
    if len(parts) < 2 or not all(map(NAME.fullmatch, parts)):
        raise InputError(f"{info.filename!r:.80} is no path of a file below a folder")
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        raise InputError(f"{info.filename!r:.80} is a link, or no file")
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{info.filename!r:.80} is encrypted, or packed by another method than deflate")


def _require_sums(inside: dict[str, bytes]) -> None:
    """Take SHA256SUMS out of the files, and check that it lists all others with their checksums."""
    lines = (line.partition("  ") for line in inside.pop(SUMS, b"").decode("ascii", "replace").splitlines())
    listed = {path: digest for digest, _, path in lines}
    for path in sorted({*inside, *listed}):
        if path not in listed:
            raise InputError(f"{path} is not listed in {SUMS}")
        if path not in inside:
            raise InputError(f"{path!r:.80} is listed in {SUMS}, but missing")
        if hashlib.sha256(inside[path]).hexdigest() != listed[path]:
            raise InputError(f"{path} was changed: its SHA-256 is not that in {SUMS}")
