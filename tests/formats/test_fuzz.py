"""Any input from a bucket, a node's memory or a user: our errors, or its meaning; never code, never another path."""

import os
import string
from dataclasses import fields

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError
from tiered_checkpoint_io.formats.dcp_metadata import parse_metadata
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Index, Manifest, Part

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

#: Text as it comes, and text of what paths and URLs are made of.
texts = st.text(max_size=60) | st.text(alphabet="abc./\\:%~@?#=&-_0 \0\n" + string.punctuation, max_size=60)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def apart(path):
    """Returns the parts of a path."""
    return path.replace("\\", "/").split("/")


# ------------------------------------------------------------------------------------------- names
@many
@given(texts)
def test_a_name_stays_below_its_folder_or_is_refused(text):
    try:
        name = ids.validate_name(text)
    except ConfigError:
        return
    assert not os.path.isabs(name)
    assert not {"", ".", ".."} & set(apart(name))
    assert "\0" not in name
    assert ids.name_from_manifest_key(ids.manifest_key(name)) == name


@many
@given(texts, texts)
def test_a_path_names_what_is_below_dirpath_or_is_refused(dirpath, path):
    for base in ("s3://bucket/run", "/data/run", dirpath):
        try:
            name = ids.name_in(ids.normalize_dirpath(base), path)
        except ConfigError:
            continue
        assert ids.validate_name(name) == name


@many
@given(texts, texts, st.none() | st.integers())
def test_urls_and_keys_of_any_kind_are_taken_apart_or_refused(text, other, step):
    ids.step_in_name(text)
    ids.series_of(text)
    ids.name_from_manifest_key(text)
    for call in (
        lambda: ids.parse_s3_url(text),
        lambda: ids.normalize_dirpath(text),
        lambda: ids.locate("s3://bucket/run", other, step),
        lambda: ids.validate_namespace(text),
        lambda: ids.validate_save_id(text),
    ):
        try:
            call()
        except ConfigError:
            continue


# ----------------------------------------------------------------------------------- configuration
@many
@given(
    st.dictionaries(st.sampled_from([each.name for each in fields(TieredCheckpointConfig)]) | texts, values, max_size=4)
)
def test_any_configuration_is_valid_or_refused(block):
    try:
        config = TieredCheckpointConfig.from_any({"dirpath": "s3://bucket/run", **block})
    except ConfigError as error:
        assert str(error)
        return
    assert TieredCheckpointConfig.from_json(config.to_json()) == config


# --------------------------------------------------------------------------------------- manifests
@many
@given(st.binary(max_size=200) | texts.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_no_manifest(data):
    for read in (Manifest.from_json, Part.from_json, Index.from_json):
        with pytest.raises(CorruptCheckpointError):
            read(data, where="x")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, '{"format": "' + "x" * (8 << 20)])
def test_deep_and_long_documents_are_refused(text):
    for read in (Manifest.from_json, Part.from_json, Index.from_json):
        with pytest.raises(CorruptCheckpointError):
            read(text.encode(), where="x")


# --------------------------------------------------------------------------------------- .metadata
@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns a ``.metadata`` as DCP writes it."""
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save({"a": torch.zeros(4, 3), "b": {"c": torch.ones(2), "d": 5}}, checkpoint_id=folder)
    return (folder / ".metadata").read_bytes()


def read_metadata(data):
    return parse_metadata(data, tier="durable", where="x")


@many
@given(st.data())
def test_damaged_metadata_raises_our_error_or_stays_in_its_folder(written, data):
    document = bytearray(written)
    for _ in range(data.draw(st.integers(1, 4))):
        document[data.draw(st.integers(0, len(document) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_metadata(bytes(document[: data.draw(st.integers(0, len(document)))]))
    except CorruptCheckpointError:
        return
    for info in (found.storage_data or {}).values():
        assert ".." not in apart(info.relative_path)
        assert not os.path.isabs(info.relative_path)
