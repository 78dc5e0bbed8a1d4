"""NeMo's S3Utils and s3_dirpath_utils, against a real S3 server."""

import os
from io import BytesIO
from pathlib import Path

import pytest

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.nemo import s3_dirpath_utils
from tiered_checkpoint_io.nemo.s3_utils import S3Utils

MIB = 1 << 20


def put(url, data=b"x"):
    S3Utils.upload_file_stream_to_s3(BytesIO(data), url)


def test_a_file_goes_there_and_comes_back_byte_for_byte(s3_url, tmp_path):
    data = os.urandom(17 * MIB + 5)
    source = tmp_path / "source"
    source.write_bytes(data)
    S3Utils.upload_file(str(source), f"{s3_url}/x.ckpt", chunk_size_MB=8, max_concurrency=2, remove_file=True)
    assert not source.exists()
    # NeMo's load downloads into an existing file.
    target = tmp_path / "target"
    target.write_bytes(b"old")
    S3Utils.download_s3_file_to_path(s3_path=f"{s3_url}/x.ckpt", file_path=str(target), chunk_size_MB=64)
    assert target.read_bytes() == data
    stream = S3Utils.download_s3_file_to_stream(Path(f"{s3_url}/x.ckpt"), max_concurrency=3)
    assert stream.read() == data
    assert sorted(each.name for each in tmp_path.iterdir()) == ["target"]


def test_a_path_exists_where_it_does_and_not_where_it_begins_like_one(s3_url):
    put(f"{s3_url}/run-10/x-last.ckpt")
    for missing in ("run-10/x", "run-1", "run-10", "run-10/", ""):
        assert not S3Utils.s3_path_exists(f"{s3_url}/{missing}"), missing
    assert S3Utils.s3_path_exists(f"{s3_url}/run-10/x-last.ckpt")
    assert S3Utils.s3_path_exists(Path(f"{s3_url}/run-10/x-last.ckpt"))
    assert [S3Utils.s3_path_exists(f"{s3_url}/{each}", match_directory=True) for each in ("run-10", "run-10/")] == [
        True
    ] * 2
    assert not S3Utils.s3_path_exists(f"{s3_url}/run-1", match_directory=True)
    assert not S3Utils.s3_path_exists(s3_url.split("/run")[0].rsplit("/", 1)[0])


@pytest.mark.matrix
def test_files_are_found_below_their_folder_alone(s3_url):
    bucket, prefix = S3Utils.parse_s3_url(s3_url)
    for name in ("run/x--step=900-a-last.ckpt", "run/x--step=90-last.ckpt", "run-2/y-last.ckpt", "run/x.txt"):
        put(f"{s3_url}/{name}")

    def found(base, **options):
        return S3Utils.find_files_with_suffix(f"{s3_url}/{base}", **options)

    both = [f"{prefix}/run/x--step=90-last.ckpt", f"{prefix}/run/x--step=900-a-last.ckpt"]
    assert found("run", suffix="last.ckpt") == found("run/", suffix="last.ckpt") == both
    assert found("run", suffix="last.ckpt", return_key_only=False) == [f"s3://{bucket}/{key}" for key in both]
    assert len(found("run")) == 3
    # A prefix, if it is one by NeMo's own function.
    base = S3Utils.parse_prefix_with_step(f"{s3_url}/run/x--step=900-b-last.ckpt")
    assert base == f"{s3_url}/run/x--step=900-"
    assert S3Utils.find_files_with_suffix(base, suffix="last.ckpt") == both[1:]
    S3Utils.remove_object(f"{s3_url}/run/x.txt")
    S3Utils.remove_object(f"{s3_url}/run/x.txt")
    assert found("run") == both


def test_urls():
    for utils in (S3Utils, s3_dirpath_utils):
        assert utils.build_s3_url("bb", "x/y") == "s3://bb/x/y"
        assert [utils.is_s3_url(each) for each in (" s3://bb/x", Path("s3://bb/x"), "/s3://bb", "", None)] == [
            True, True, False, False, False,
        ]  # fmt: skip
    assert S3Utils.parse_s3_url("s3://bb/x/y") == S3Utils.parse_s3_url(Path("s3://bb/x/y")) == ("bb", "x/y")
    assert S3Utils.parse_s3_url("s3://bb") == ("bb", "")
    assert S3Utils.parse_s3_url("/local") == (None, None)
    assert S3Utils.parse_prefix_with_step("no step") == "no step"
    with pytest.raises(ConfigError, match="names no object"):
        S3Utils.remove_object("s3://bbucket/folder/")
