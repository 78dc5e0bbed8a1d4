"""What a delta upload sends of a step that trains little: bytes sent / bytes of the checkpoint, for a LoRA state.

Most of the parameters are frozen; those that are trained, and AdamW's state of them, are all that changes, beside the
step. *apart*: they lie after the frozen ones. *between*: each layer has its own, as PEFT's models do. For each step
the file is laid out and hashed as a save does it, and the upload is planned as a drain does it, by the hashes alone.
One step is then uploaded to a server (moto's, in this process), whose counters must say the same.

``--growing``: a text in the state, such as the path of the best checkpoint, becomes longer by one byte a step.

Prints, last, ``sent_apart=… sent_between=… shifted=… of …``: medians, and in how many steps the layout moved.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator

import torch

from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.model.delta import Piece, Same, pieces_of, same_ranges
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores.base import Delta
from tiered_checkpoint_io.stores.s3 import MIB, S3Store
from tiered_checkpoint_io.stores.s3_uploads import COPY_PART

LAYERS, PART = 16, 64 * MIB


def lora_state(size: int, trained: float, *, between: bool, generator: torch.Generator) -> dict[str, object]:
    """A state of about ``size`` bytes in float32, of which a share is trained, and Adam's two averages of that."""

    def tensor(count: float) -> torch.Tensor:
        return torch.randn(int(count), generator=generator)

    floats = size / 4 / LAYERS
    frozen = {f"layers.{layer}.weight": tensor(floats * (1 - trained)) for layer in range(LAYERS)}
    adapters = {f"layers.{layer}.lora": tensor(floats * trained / 3) for layer in range(LAYERS)}
    names = [name for pair in zip(frozen, adapters, strict=True) for name in pair] if between else [*frozen, *adapters]
    weights = frozen | adapters
    averages = {
        index: {"step": torch.tensor(0.0), "exp_avg": tensor(len(each)), "exp_avg_sq": tensor(len(each))}
        for index, each in enumerate(adapters.values())
    }
    return {"state_dict": {name: weights[name] for name in names}, "optimizer": averages, "step": 0, "best": ""}


def train(state: dict[str, object], *, growing: bool) -> None:
    """One step: what is trained changes."""
    weights, averages = state["state_dict"], state["optimizer"]
    assert isinstance(weights, dict)
    assert isinstance(averages, dict)
    trained = [each for name, each in weights.items() if name.endswith("lora")]
    for tensor in (*trained, *(value for each in averages.values() for value in each.values())):
        tensor.add_(1)
    state["step"] = int(str(state["step"])) + 1
    if growing:
        state["best"] = f"{state['best']}x"


def described(state: dict[str, object], path: str, buffer: memoryview) -> FileEntry:
    """The file of a state, written to a buffer."""
    image = plan(state)
    return FileEntry(path, image.size, image.chunk_size, image.fill(buffer))


def sent(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.stop - piece.start for piece in pieces if not piece.key)


@contextlib.contextmanager
def served() -> Iterator[S3Store]:
    """A bucket of a server in this process."""
    from moto.server import ThreadedMotoServer

    from tiered_checkpoint_io.testing.servers import S3Server

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = S3Server(f"http://{host}:{port}", "testing", "testing")
        endpoint.make_bucket("delta")
        credentials = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        options = {"endpoint_url": endpoint.endpoint_url, "region": "us-east-1", "credentials": credentials}
        with contextlib.closing(S3Store("s3://delta/run", part_size=PART, **options)) as store:
            yield store
    finally:
        server.stop()


def uploaded(first: memoryview, second: memoryview, same: tuple[Same, ...]) -> int:
    """Bytes that left for the second upload."""
    with served() as store:
        store.upload("0", first)
        before = store.metrics.snapshot()["bytes.sent"]
        store.upload("1", Delta(second, same))
        return store.metrics.snapshot()["bytes.sent"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--trained", type=float, default=0.02, help="its share that changes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--growing", action="store_true")
    options = parser.parse_args()
    medians, shifted = {}, 0
    for layout in ("apart", "between"):
        generator = torch.Generator().manual_seed(0)
        state = lora_state(options.mib * MIB, options.trained, between=layout == "between", generator=generator)
        buffers = [memoryview(bytearray(options.mib * MIB + MIB)) for _ in range(2)]
        last = described(state, "0", buffers[0])
        shares = []
        for step in range(1, options.steps + 1):
            train(state, growing=options.growing)
            entry = described(state, str(step), buffers[step % 2])
            same = same_ranges(entry, [last])
            bytes_sent = sent(pieces_of(entry.size, same, PART, COPY_PART))
            shares.append(bytes_sent / entry.size)
            shifted += entry.size != last.size
            if step == 1:
                counted = uploaded(buffers[0][: last.size], buffers[1][: entry.size], same)
                assert counted == bytes_sent, (counted, bytes_sent)
            last = entry
        print(f"{layout}: sent {min(shares):.3f} to {max(shares):.3f} of {last.size / MIB:.0f} MiB a step")
        medians[layout] = statistics.median(shares)
    ratios = " ".join(f"sent_{layout}={median:.3f}" for layout, median in medians.items())
    print(f"{ratios} shifted={shifted} of {2 * options.steps}")


if __name__ == "__main__":
    main()
