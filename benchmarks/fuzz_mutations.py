"""Mutations for `fuzz.py`: of bytes, and of the structure of JSON, JSON Lines, tables, tar, zip, safetensors, .npy and
PNG files. Each takes the content of a valid file and a random number generator, and returns another content."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

# Written as text into the JSON, since `json.dumps` cannot express them.
_DEEP, _BIG, _TWICE = "@deep@", "@big@", "@twice@"
STRINGS = [
    "", "x", "0", "1e999", "nan", "\x00", "a\x00b", "\ud800", "\ufeff", "\u2028", "..", "../../up", "/etc/passwd",
    "~root", "{{ 7 * 7 }}", "!singleton:os:system", "%s%n", "é" * 50, "n" * 300, "y" * 100_000, "step_00000001", "[{",
    "true", "-1", "file:///etc/passwd", "\x1b[31m", "<script>", "9" * 400,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), [], {}, [[]], [None], [0], {"": None}, {"a": {"b": []}}, [1, "a", None],
    _DEEP, _BIG, *STRINGS,
]  # fmt: skip
_TOKENS = [
    b"\x00", b"\xff", b"\xfe\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\r", b"\n\n", b'"',
    b"'", b"\\", b"{", b"}", b"[", b"]", b",", b":", b"&a", b"*a", b"!!python/object", b"- ", b"  ", b"\t", b"%", b"#",
    b"1" * 400, b"\x1f\x8b", b"PK\x03\x04", b"<<: ", b"{%", b"{{", b"%}", b"1e999", b"NaN", b"\\ud800", b"|", b">",
    b"?",
]  # fmt: skip
_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1]

_YAML = [
    "<<: *nowhere",
    "<<: 1",
    "<<: [1]",
    "x: &x {y: *x}",
    "? [a, b]\n: 1",
    "? {a: 1}\n: 2",
    "---\nb: 1",
    "...",
    "%YAML 9.9",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ x }}",
    "{% include '/etc/passwd' %}",
    "{{ 'x' * 10**10 }}",
    "{{ ().__class__ }}",
    "n: 0x" + "f" * 5000,
    "n: " + "9" * 5000,
    "n: 1:99:99:99",
    "n: 2001-02-30",
    "n: .inf",
    "n: 1e999999",
    "{% if %}",
    "{{ range(10**9)|list }}",
    "{{ 9 ** 9 ** 9 }}",
]

Mutation = Callable[[bytes, random.Random], bytes]


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """One to eight changes of bytes that know nothing about the format."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64, 512)))
        kind = rng.randrange(10)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end] * rng.choice((1, 3, 50))
        elif kind == 4:
            data[at:at] = rng.choice(_TOKENS)
        elif kind == 5:
            data[at : at + 1] = rng.choice(_TOKENS)
        elif kind == 6:
            size = rng.choice("BHIQ")
            number = rng.choice(_NUMBERS) & ((1 << 8 * struct.calcsize(size)) - 1)
            data[at : at + struct.calcsize(size)] = struct.pack(rng.choice("<>") + size, number)
        elif kind == 7:
            del data[at:]
        elif kind == 8:
            data[at:end] = rng.randbytes(end - at)
        elif rng.random() < 0.1:
            data = bytearray(rng.choice((b"", b"\0" * 100, rng.randbytes(200), b"\n", b"null", b"[" * 100_000)))
        if len(data) > 1 << 20:
            del data[1 << 20 :]
    return bytes(data)


# -- JSON ------------------------------------------------------------------------------------------------------------


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    found, left = [], [tree]
    while left:
        here = left.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        for key in keys:
            found.append((here, key))
            left.append(here[key])
    return found


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Drop, duplicate, retype, rename or move values, at random places of a tree of plain values."""
    whole = [copy.deepcopy(tree)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = _places(whole)
        holder, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0 and holder is not whole:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice((*STRINGS[:20], key + " ", key.upper(), key[:-1]))] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            holder[_TWICE + key] = rng.choice(VALUES)
        elif kind == 2:
            holder.insert(key, copy.deepcopy(holder[key]))
            del whole[1:]
        elif kind == 3:
            other, place = rng.choice(places)
            holder[key] = copy.deepcopy(other[place])
        elif kind == 4 and isinstance(holder[key], int | float):
            holder[key] = rng.choice(
                (-holder[key], holder[key] + 1, str(holder[key]), float(holder[key]), [holder[key]])
            )
        elif kind == 5:
            holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, str(holder[key])))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return whole[0]


def dump_json(tree: Any, rng: random.Random | None = None) -> bytes:
    """A mutated tree as JSON: also what `json.dumps` cannot write, such as a key twice."""
    text = json.dumps(tree, ensure_ascii=rng is None or rng.random() < 0.7)
    text = text.replace(f'"{_DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{_BIG}"', "9" * 5_000)
    return text.replace(_TWICE, "").encode("utf-8", "surrogatepass")


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    return dump_json(mutate_tree(json.loads(content), rng), rng)


def mutate_lines(content: bytes, rng: random.Random) -> bytes:
    """A JSON Lines file: another value in a line, or lines dropped, doubled, joined."""
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, rng.choice((b"", b"   ", b"null", b"[]", b"1", b'"text"', b"{", b"\xff", lines[at])))
    elif kind == 2:
        lines[at] = lines[at] + lines[at - 1]
    else:
        lines[at] = mutate_json(lines[at], rng).replace(b"\n", b" ")
    return rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"\n\n")).join(lines) + rng.choice((b"", b"\n"))


def mutate_table(content: bytes, rng: random.Random) -> bytes:
    """A CSV or TSV file: cells, rows and columns."""
    delimiter = b"\t" if b"\t" in content else b","
    rows = [line.split(delimiter) for line in content.splitlines()]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(rows))
        column = rng.randrange(len(rows[at]) or 1)
        kind = rng.randrange(7)
        if kind == 0 and rows[at]:
            del rows[at][column : column + 1]
        elif kind == 1:
            rows[at].insert(column, rng.choice(STRINGS).encode("utf-8", "surrogatepass"))
        elif kind == 2:
            rows.insert(at, list(rows[at]))
        elif kind == 3 and len(rows) > 1:
            del rows[at]
        elif kind == 4:
            rows[at][column : column + 1] = [b'"' + b"long, " * rng.choice((1, 30_000)) + rng.choice((b'"', b""))]
        else:
            rows[at][column : column + 1] = [rng.choice(STRINGS).encode("utf-8", "surrogatepass")]
    return rng.choice((b"\n", b"\n", b"\r\n", b"\r")).join(delimiter.join(row) for row in rows)


# -- YAML ------------------------------------------------------------------------------------------------------------


def mutate_yaml(content: bytes, rng: random.Random) -> bytes:
    """A YAML file: lines and values, aliases that multiply, deep nesting, tags."""
    lines = content.decode("utf-8", "replace").splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines) or 1)
        line = lines[at] if lines else ""
        kind = rng.randrange(11)
        if kind == 0:
            del lines[at : at + 1]
        elif kind == 1:
            lines.insert(at, line)
        elif kind == 2:
            lines[at : at + 1] = [" " * rng.randrange(9) + line.strip()]
        elif kind == 3:
            bombs = [
                f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['x'] * 9)}]"
                for n in range(rng.choice((3, 9, 30)))
            ]
            lines[at:at] = bombs
        elif kind == 4:
            depth = rng.choice((50, 2_000, 100_000))
            lines.append("deep: " + rng.choice(("[" * depth + "]" * depth, "{a: " * depth)))
        elif kind == 5:
            key = line.partition(":")[0]
            tag = rng.choice(
                (
                    "!!python/object/apply:os.system",
                    "!singleton:os:system",
                    "!factory:x:y",
                    "!var",
                    "!list",
                    "!dict:@x",
                    "!",
                    "!!binary",
                    "!!set",
                    "!!timestamp",
                    "!!omap",
                    "!!int",
                    "!!float",
                    "!!merge",
                    "!singleton:",
                    "!partial:builtins:dict",
                )
            )
            lines[at : at + 1] = [f"{key}: {tag} {rng.choice([*STRINGS[:20], '[1, 2]', '{a: 1}', '2001-99-99'])!r}"]
        elif kind == 6:
            bad = rng.choice(_YAML)
            lines[at:at] = bad.splitlines()
        elif kind == 7 and line:
            lines[at] = f"{line.partition(':')[0]}: {rng.choice(STRINGS[:20])}"
        elif kind == 8 and line:
            lines[at] = rng.choice(STRINGS[:20]) + ":" + line.partition(":")[2]
        else:
            return mutate_bytes("\n".join(lines).encode("utf-8", "surrogatepass"), rng)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


# -- archives --------------------------------------------------------------------------------------------------------


def mutate_tar(content: bytes, rng: random.Random) -> bytes:
    """A tar file: hostile members (absolute paths, links, devices, huge sizes), headers with a valid checksum."""
    if rng.random() < 0.4:
        return _tar_header(bytearray(content), rng)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar if member.isreg()]  # type: ignore[union-attr]
    at = rng.randrange(len(members))
    member, data = members[at]
    member = copy.copy(member)
    kind = rng.randrange(6)
    if kind == 0:
        member.name = rng.choice(
            (
                "/etc/x.png",
                "../../x.png",
                "a/../../x.png",
                "",
                ".",
                "/",
                ".png",
                "a\nb.png",
                "é" * 200 + ".png",
                "x" * 5_000 + ".png",
                "n.cls",
                "0.jpg",
                "\udc80.png",
            )
        )
    elif kind == 1:
        member.type = rng.choice(
            (
                tarfile.SYMTYPE,
                tarfile.LNKTYPE,
                tarfile.CHRTYPE,
                tarfile.BLKTYPE,
                tarfile.FIFOTYPE,
                tarfile.DIRTYPE,
                tarfile.CONTTYPE,
                tarfile.GNUTYPE_SPARSE,
                b"Z",
            )
        )
        member.linkname = rng.choice(("/etc/passwd", "../../x", "0.png", ""))
    elif kind == 2:
        member.pax_headers = {
            rng.choice(
                ("size", "path", "GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.major", "mtime", "hdrcharset", "x")
            ): rng.choice(("-1", "9" * 30, "x", "1,2", "", "\x00", "../../up", "BINARY"))
        }
    elif kind == 3:
        data = rng.choice((b"", mutate_bytes(data, rng), mutate_png(data, rng) if data[:4] == b"\x89PNG" else b"-1"))
    elif kind == 4:
        members.insert(rng.randrange(len(members)), members[at])
    else:
        data = rng.choice(
            (
                b"9" * 5_000,
                b"\xff",
                b"-1",
                b"[" * 100_000,
                b"{}",
                b'{"label": [1]}',
                b"1.5",
                b"nan",
                b"\x00",
                b"true",
                b"cat",
            )
        )
    members[at] = (member, data)
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)), errors="surrogateescape"
    ) as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def _tar_header(data: bytearray, rng: random.Random) -> bytes:
    headers = [at for at in range(0, len(data) - 512, 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(headers)
    place, length = rng.choice(
        ((0, 100), (100, 8), (124, 12), (124, 12), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155))
    )
    value = rng.choice(
        (
            b"",
            b"7" * length,
            b"-1",
            b"\x80" + b"\x7f" * 11,
            b"\xff" * 12,
            b"\x80" + b"\0" * 6 + b"\x10",
            b"xL"[:length],
            rng.randbytes(length),
            b"77777777777",
            b"L",
            b"K",
            b"x",
            b"g",
            b"S",
        )
    )
    data[at + place : at + place + length] = value[:length].ljust(length, b"\0")
    data[at + 148 : at + 156] = b" " * 8
    data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


def mutate_zip(content: bytes, rng: random.Random) -> bytes:
    """A zip file (of torch or NumPy): entries renamed, replaced, dropped, compressed or huge."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    at = rng.randrange(len(entries))
    name, data = entries[at]
    kind = rng.randrange(7)
    if kind == 0:
        del entries[at]
    elif kind == 1:
        name = rng.choice((name.upper(), "../../" + name, "/" + name, name + "x", "n", "a\x00b", entries[at - 1][0]))
    elif kind == 2:
        data = rng.choice((b"", data[: len(data) // 2], data * 3))
    elif kind == 3 and data[:6] == b"\x93NUMPY":
        data = mutate_npy(data, rng)
    elif kind == 4:
        data = bytes(50 << 20)  # a bomb: 50 kB compressed
    else:
        data = mutate_bytes(data, rng)
    if entries and kind:
        entries[at] = (name, data)
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if kind == 4 or rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name) if method == zipfile.ZIP_STORED else name, data)
    return out.getvalue()


# -- arrays and images -----------------------------------------------------------------------------------------------


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file: its header (length, names, types, shapes, offsets), or its data."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = rng.randrange(6)
    if kind == 0:
        return struct.pack("<Q", rng.choice((*_NUMBERS, size - 1, size + 1, len(content)))) + content[8:]
    if kind == 1:
        header = mutate_bytes(header, rng)
    elif kind == 2:
        data = rng.choice((data[:-1], data + b"\0", b"", data * 2))
    else:
        tree = json.loads(header)
        if kind == 3:
            entry = tree[rng.choice([name for name in tree if name != "__metadata__"])]
            field = rng.choice(("dtype", "shape", "data_offsets"))
            entry[field] = rng.choice(
                (
                    "F32",
                    "F64",
                    "I8",
                    "BOOL",
                    "F8_E4M3",
                    "C64",
                    "X",
                    [0],
                    [],
                    [2**62, 2],
                    [2**40],
                    [0, 2**60],
                    [4, 0],
                    [-1],
                    [1] * 100,
                    [3, 2],
                    None,
                    {},
                )
            )
        elif kind == 4 and "__metadata__" in tree:
            meta = tree["__metadata__"]
            name = rng.choice(list(meta))
            meta[name] = rng.choice(
                (
                    "",
                    "x",
                    "[]",
                    "1",
                    "null",
                    '{"a": "b"}',
                    '{"a": []}',
                    '{"a": {}}',
                    "[" * 100_000,
                    "\x00",
                    1,
                    None,
                    '["a"]',
                    '{"weight": [9]}',
                    mutate_tree({"weight": "bias", "x": [0, 0]}, rng).__repr__(),
                )
            )
        else:
            tree = mutate_tree(tree, rng)
        header = dump_json(tree)
    return struct.pack("<Q", len(header)) + header + data


def mutate_npy(content: bytes, rng: random.Random) -> bytes:
    """A .npy file: the Python literal in its header, or the data."""
    size = struct.unpack("<H", content[8:10])[0]
    header, data = content[10 : 10 + size].decode(), content[10 + size :]
    kind = rng.randrange(5)
    if kind == 0:
        return mutate_bytes(content, rng)
    if kind == 1:
        count = min(8, len(data) // 8)
        at = 8 * rng.randrange(max(1, len(data) // 8))
        number = rng.choice((0, 1, 7, 2**31, 2**63 - 1, 2**64 - 1, 2**40, count))
        data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    elif kind == 2:
        old = header.split("'descr': ")[1].split(",")[0]
        new = rng.choice(
            (
                "'<i4'",
                "'|O'",
                "'<f8'",
                "'>i8'",
                "'|S8'",
                "'<U4'",
                "'|b1'",
                "'<i2'",
                "'<M8[s]'",
                "'x'",
                "[('a', '<i8')]",
                "None",
                "'|V8'",
                "'<c16'",
            )
        )
        header = header.replace(old, new)
    elif kind == 3:
        old = header.split("'shape': ")[1].split("),")[0] + ")"
        new = rng.choice(
            (
                "()",
                "(0,)",
                "(1,)",
                "(2, 2)",
                "(9999999999999,)",
                "(-1,)",
                "(4611686018427387904, 4)",
                "None",
                "'x'",
                "(1.5,)",
                "(True,)",
            )
        )
        header = header.replace(old, new)
    else:
        header = rng.choice(
            (
                header.replace("False", "True"),
                header.replace("False", "1"),
                "(" * 5_000,
                "{}",
                "{'descr': '<i8'}",
                "__import__('os')",
                header[:-20] + "\n",
                "'" + "x" * 9_000,
            )
        )
    text = header.encode("latin1")
    return content[:8] + struct.pack("<H", len(text)) + text + data


def mutate_png(content: bytes, rng: random.Random) -> bytes:
    """A PNG file: chunks with valid checksums, huge dimensions, bombs."""
    chunks, at = [], 8
    while at + 8 <= len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    kind = rng.randrange(6)
    number = rng.randrange(len(chunks))
    name, data = chunks[number]
    if kind == 0 or name == b"IHDR":
        name, data = chunks[0]
        sides = rng.choice(
            ((0, 1), (1, 0), (2**31 - 1, 2**31 - 1), (2**32 - 1, 1), (30_000, 30_000), (12_000, 12_000), (3, 1_000))
        )
        data = struct.pack(">II", *sides) + data[8:] if rng.random() < 0.7 else mutate_bytes(data, rng)
        chunks[0] = name, data
    elif kind == 1:
        chunks.insert(
            rng.randrange(len(chunks)),
            (
                rng.choice(
                    (b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"iCCP", b"tRNS", b"PLTE", b"acTL", b"fcTL", b"sBIT", b"gAMA")
                ),
                rng.choice(
                    (
                        b"",
                        b"k\0\0" + zlib.compress(bytes(80 << 20)),
                        b"k\0\0" + rng.randbytes(30),
                        rng.randbytes(20),
                        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
                    )
                ),
            ),
        )
    elif kind == 2:
        del chunks[number]
    elif kind == 3:
        chunks[number] = rng.choice((b"IHDR", b"IEND", b"tEXt", b"XXXX")), data
    elif kind == 4:
        chunks[number] = name, mutate_bytes(data, rng)
    else:
        chunks[number] = name, rng.choice((zlib.compress(bytes(1_000)), b"", zlib.compress(bytes(50 << 20)), data * 2))
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return content[:8] + b"".join(parts)


BY_SUFFIX: dict[str, Mutation] = {
    ".json": mutate_json,
    **dict.fromkeys((".jsonl", ".ndjson"), mutate_lines),
    **dict.fromkeys((".csv", ".tsv"), mutate_table),
    **dict.fromkeys((".yaml", ".yml"), mutate_yaml),
    ".tar": mutate_tar,
    **dict.fromkeys((".pt", ".npz"), mutate_zip),
    ".safetensors": mutate_safetensors,
    ".npy": mutate_npy,
    ".png": mutate_png,
}


def mutate(name: str, content: bytes, rng: random.Random) -> bytes:
    """Mutate a file by its structure (two times out of three, if its suffix is known) or by its bytes."""
    suffix = name[name.rfind(".") :]
    by_structure = BY_SUFFIX.get(suffix)
    if by_structure is not None and rng.random() < 0.67:
        return by_structure(content, rng)
    return mutate_bytes(content, rng)
