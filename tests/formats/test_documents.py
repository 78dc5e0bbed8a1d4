"""Names, URLs, ids and manifests: round trips, bounds, and input that is not ours."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.failing import failing

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import MAX_OBJECT, chunk_ranges, chunk_size_for, dump
from tiered_checkpoint_io.model.manifest import (
    Content,
    FileEntry,
    Index,
    IndexRow,
    Manifest,
    Metric,
    Part,
    check_digest,
)

names = st.from_regex(r"[A-Za-z0-9=_ü.-]{1,20}(/[A-Za-z0-9=_-]{1,20}\.ckpt)?", fullmatch=True).filter(
    lambda name: not {".", "..", ".tiered"} & set(name.split("/"))
)
save_ids = st.builds(
    lambda now, n: ids.save_id(ids.new_run_id(now=now), n), st.floats(0, 4e9), st.integers(0, 99_999_999)
)
entries = st.builds(
    lambda name, size: FileEntry(
        name, size, chunk_size_for(size), ("0" * 32,) * len(chunk_ranges(size, chunk_size_for(size)))
    ),
    names,
    st.integers(0, 1 << 30),
)
ranked = st.from_regex(r"__[0-9]{1,5}_0\.distcp|meta\.pt", fullmatch=True)
contents = st.builds(
    lambda save_id, step, entry, metric: Content(
        save_id, step, 0, "full", 1.5, 4, {"torch": "2"}, (entry,), metric, switch=entry.basename
    ),
    save_ids,
    st.integers(-1, 1 << 40),
    entries,
    st.none() | st.builds(Metric, st.text(max_size=9), st.floats(allow_nan=False)),
)


@given(names, contents, st.lists(contents, max_size=2), st.lists(names, max_size=2), st.none() | names)
def test_manifests_survive_storage(name, content, previous, aliases, alias_of):
    manifest = Manifest(name, content, tuple(previous), tuple(aliases), alias_of)
    assert Manifest.from_json(manifest.to_json(), where="x") == manifest


@given(names, contents, st.booleans())
def test_parts_survive_storage(name, content, durable):
    part = Part(name, 3, content, "s3://bucket", durable)
    assert Part.from_json(part.to_json(), where="x") == part
    # An index names it by the digest of what is stored: its own bytes are sent on, not made again.
    stored = dump({key: value for key, value in json.loads(part.to_json()).items() if key != "digest"}, compact=True)
    assert Part.from_json(stored, where="x").to_json() == stored


@given(names, save_ids, st.lists(st.lists(st.tuples(ranked, st.integers(0, 1 << 40)), max_size=3), max_size=5))
def test_indexes_survive_storage_and_one_changed_byte_is_found(name, save_id, parts):
    rows = {
        rank: IndexRow(tuple((f"{name}/{basename}", size) for basename, size in files), "0" * 32)
        for rank, files in enumerate(parts)
    }
    index = Index(name, save_id, rows)
    data, reference = index.to_json()
    assert Index.from_json(data, where="x") == index
    assert reference.total == sum(size for _, size in index.paths)
    check_digest(data, reference.digest, "the index", key="x")
    with pytest.raises(CorruptCheckpointError):
        check_digest(data.replace(b"rows", b"rowz"), reference.digest, "the index", key="x")
    content = Content(save_id, 1, 0, "sharded", 1.5, 4, {}, (), parts=4, index=reference)
    head = Manifest(name, content, (replace(content, step=2),)).to_json()
    assert Manifest.from_json(head, where="x").content == content
    assert content.size == reference.total


@settings(max_examples=100)
@given(contents, st.data())
def test_damage_of_a_manifest_is_our_error_or_changes_nothing(content, data):
    written = Manifest("x.ckpt", content).to_json()
    document = bytearray(written)
    for _ in range(data.draw(st.integers(1, 5))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    for read in (Manifest.from_json, Part.from_json):
        try:
            # Often it is whole.
            cut = document[: data.draw(st.just(len(document)) | st.integers(0, len(document)))]
            assert read(bytes(cut), where="x").to_json() == written
        except TieredCheckpointError as error:
            assert "x" in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.matrix
@given(
    contents,
    st.sampled_from(["name", "files", "save_id", "step", "kind", "previous", "aliases", "metric", "created"]),
    json_values,
)
def test_hostile_values_raise_our_errors_only(content, key, value):
    document = json.loads(Manifest("x.ckpt", content).to_json())
    del document["digest"]
    document[key] = value
    try:
        # With a digest of its own, so that the values are looked at.
        Manifest.from_json(dump(document), where="x")
    except TieredCheckpointError:
        pass


def test_a_manifest_cannot_reach_out_of_its_folder():
    for path in ("../x", "/etc/passwd", "a/../../b", "s3://other/x", ".tiered/manifests/x.json"):
        with pytest.raises(TieredCheckpointError):
            FileEntry.from_json({"path": path, "size": 0, "chunk_size": 1, "hashes": ["0" * 32]})


@given(contents, st.integers(0, 99), st.booleans())
def test_any_other_version_is_named_by_its_number(content, version, sealed):
    document = json.loads(Manifest("x.ckpt", content).to_json())
    del document["digest"]
    document |= {"version": version, "writer": {"tiered_checkpoint_io": "9.8"}}
    data = dump(document) if sealed else json.dumps(document).encode()
    if version == 1 and sealed:
        assert Manifest.from_json(data, where="x").content.writer == document["writer"]
    elif version < 2:
        with pytest.raises(CorruptCheckpointError, match="version is 0|differs from its digest"):
            Manifest.from_json(data, where="x")
    else:
        with failing("format", match=rf"version {version} is not 1, .*upgrade .* to 9\.8"):
            Manifest.from_json(data, where="x")


@given(st.integers(0, MAX_OBJECT))
def test_chunks_cover_a_file_exactly(size):
    ranges = chunk_ranges(size, chunk_size_for(size))
    assert len(ranges) <= 16_385
    assert sum(length for _, length in ranges) == size


@given(names)
def test_names_and_keys(name):
    assert ids.name_from_manifest_key(ids.manifest_key(name)) == name
    for dirpath in ("s3://bucket/run", "/data/run"):
        assert ids.name_in(dirpath, ids.join_url(dirpath, name)) == name
        assert ids.name_in(dirpath, name) == ids.name_in(dirpath, f"./{name}") == name


@given(save_ids, st.floats(0, 4e9))
def test_a_later_run_sorts_behind_whatever_its_clock_says(seen, now):
    assert ids.save_id(ids.new_run_id(after=seen, now=now), 0) > seen


ACCESS_POINT = "arn:aws:s3:eu-west-1:123456789012:accesspoint/name"


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("s3://bucket/a/b", ("bucket", "a/b")),
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        (Path("s3://bucket/a"), ("bucket", "a")),
        (f"s3://{ACCESS_POINT}/a/b", (ACCESS_POINT, "a/b")),
        (f"s3://{ACCESS_POINT}/", (ACCESS_POINT, "")),
        (Path(f"s3://{ACCESS_POINT}"), (ACCESS_POINT, "")),
    ],
)
def test_s3_urls(url, parsed):
    assert ids.is_s3_url(url)
    assert ids.parse_s3_url(url) == parsed
    assert ids.parse_s3_url(ids.build_s3_url(*parsed)) == parsed


def test_what_is_no_s3_url():
    for text in ("/x", "gs://bucket/x", "s3", "", "S3x://y"):
        assert not ids.is_s3_url(text)
    for text in ("s3://", "s3:///x", "gs://b/x", "s3://b c/x", "s3://arn:aws:s3:::b/x"):
        with pytest.raises(ConfigError):
            ids.parse_s3_url(text)


def test_steps_and_last_in_names():
    for name, step in {
        "epoch=0-step=500.ckpt": 500,
        "step_42/x": 42,
        "a/step-7": 7,
        "footstep=3": None,
        f"step_{1 << 62}": None,
        "x": None,
    }.items():
        assert ids.step_in_name(name) == step
    for name, last in {
        "last.ckpt": True,
        "a/last-v1.ckpt": True,
        "m--x-last.ckpt": True,
        "lasting.ckpt": False,
        "blast.ckpt": False,
    }.items():
        assert ids.is_last(name) == last
