"""S3 clients for the drain, compared: ours, boto3's parts and obstore, over http and TLS, with integrity checks on.

Each way uploads the same file of random bytes on tmpfs to a storing server on this machine, in parts of 64 MiB, in turn
in each round. Ours is the store as the drain uses it. Prints the medians of the rate beside boto3's of the same
round, and of processor seconds a GiB, without the server's; and, last, a line of JSON, with what the threads of ours
spend their time on.

obstore is used if it is installed; without it there is a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from measure import GIB, MIB, measure, ratio
from parts import OF_UPLOAD, shares
from s3_process import StoringServer
from s3_state import BUCKET

PART, BASE, OURS = 64 * MIB, "boto3, parts, CRC32", "ours"
WARM_ROUNDS = 1


def by_boto3(server: StoringServer, view: memoryview, threads: int) -> Callable[[], None]:
    import boto3
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, max_pool_connections=threads)
    verify = server.certificate or None
    client = boto3.client("s3", endpoint_url=server.url, config=config, verify=verify, **server.credentials)

    # botocore takes no views; copied before anything is timed.
    bodies = [bytes(view[start : start + PART]) for start in range(0, len(view), PART)]

    def upload() -> None:
        target = {"Bucket": BUCKET, "Key": "boto3"}
        upload_id = client.create_multipart_upload(**target)["UploadId"]

        def part(number: int) -> dict[str, Any]:
            sent = client.upload_part(**target, UploadId=upload_id, PartNumber=number, Body=bodies[number - 1])
            return {"PartNumber": number, "ETag": sent["ETag"]}

        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(part, range(1, len(bodies) + 1)))
        client.complete_multipart_upload(**target, UploadId=upload_id, MultipartUpload={"Parts": parts})

    return upload


def by_obstore(
    server: StoringServer, view: memoryview, threads: int, checksum: str | None = "SHA256"
) -> Callable[[], None]:
    import obstore
    from obstore.store import S3Store

    options: dict[str, Any] = {"allow_http": True}
    if server.certificate:
        # It takes no certificates of one's own; encryption costs the same.
        options["allow_invalid_certificates"] = True
    store = S3Store(
        BUCKET,
        endpoint=server.url,
        access_key_id="bench",
        secret_access_key="bench",
        region="us-east-1",
        **({"checksum_algorithm": checksum} if checksum else {}),
        virtual_hosted_style_request=False,
        client_options=options,
    )
    return lambda: (
        obstore.put(store, "obstore", view, use_multipart=True, chunk_size=PART, max_concurrency=threads) and None
    )


def by_ours(server: StoringServer, view: memoryview, threads: int, checksum: str | None = None) -> Callable[[], None]:
    from tiered_checkpoint_io.stores.s3 import S3Store

    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    if server.certificate:
        os.environ["AWS_CA_BUNDLE"] = server.certificate
    store = S3Store(
        f"s3://{BUCKET}/ours",
        part_size=PART,
        write_concurrency=threads,
        write_options={"ChecksumAlgorithm": checksum} if checksum else {},
        endpoint_url=server.url,
        region="us-east-1",
    )
    return lambda: store.upload("file", view)


WAYS: dict[str, Callable[[StoringServer, memoryview, int], Callable[[], None]]] = {
    BASE: by_boto3,
    "obstore, SHA256": by_obstore,
    "obstore, no checksum": lambda server, view, threads: by_obstore(server, view, threads, None),
    OURS: by_ours,
    "ours, CRC32": lambda server, view, threads: by_ours(server, view, threads, "CRC32"),
    "ours, SHA256": lambda server, view, threads: by_ours(server, view, threads, "SHA256"),
}


def compare(mebibytes: int, rounds: int, threads: int, *, tls: bool) -> dict[str, Any]:
    """Per way: rate beside boto3's, processor seconds a GiB, seconds; or why it could not run."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(StoringServer(tls=tls))
        file = stack.enter_context(tempfile.TemporaryFile(prefix="tiered-bench-", dir="/dev/shm"))
        file.write(os.urandom(MIB) * mebibytes)
        file.seek(0)
        view = memoryview(file.read())
        runs: dict[str, Callable[[], None]] = {}
        for name, make in WAYS.items():
            try:
                runs[name] = make(server, view, threads)
                runs[name]()
            except Exception as error:
                runs.pop(name, None)
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        if BASE not in runs:
            raise RuntimeError(f"what the others are compared with failed: {found[BASE]}")
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        used: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds + WARM_ROUNDS):
            for name, run in runs.items():
                with measure() as taken:
                    run()
                if number >= WARM_ROUNDS:
                    seconds[name].append(taken.seconds)
                    used[name].append(taken.cpu_s * GIB / len(view))
        with shares(OF_UPLOAD) as found_shares:
            for _ in range(rounds):
                runs[OURS]()
        for name in runs:
            found[name] = {
                "seconds": statistics.median(seconds[name]),
                "rate_to_boto3": ratio(seconds[BASE], seconds[name]),
                "cpu_s_per_GiB": statistics.median(used[name]),
            }
        found[OURS]["shares"] = found_shares
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    found = {}
    for scheme in ("http", "https"):
        found[scheme] = compare(options.mebibytes, options.rounds, options.threads, tls=scheme == "https")
        for name, row in found[scheme].items():
            figures = row.get("error") or "  ".join(
                f"{key}={value:.2f}" for key, value in row.items() if key != "shares"
            )
            print(f"{scheme:6}{name:22}{figures}", flush=True)
    print(json.dumps({"clients": found}))


if __name__ == "__main__":
    main()
