"""Common typing errors; each is reported before anything is done."""

from omegaconf import OmegaConf

from tiered_checkpoint_io import TieredCheckpointIO

whole = OmegaConf.create(
    {
        "trainer": {"max_steps": 100},
        "model": {"path": "${oc.env:NOT_SET_ANYWHERE}"},
        "s3_checkpointing": {"dirpath": "s3://bucket/run", "namespace": "gpt-1"},
    }
)
for block in (
    {"dirpath": "s3//bucket/run"},
    {"dirpath": "s3:/bucket/run"},
    {"dirpath": "https://bucket.s3.eu-central-1.amazonaws.com/run"},
    {"dirpath": "s3://bucket/run", "namespce": "gpt-1"},
    {"dirpath": "s3://bucket/run", "memory_every_n_step": 10},
    {"dirpath": "s3://bucket/run", "s3_every_n_train_steps": "50"},
    {"namespace": "gpt-1"},
    dict(whole),
    whole,
):
    print(block)
    try:
        TieredCheckpointIO.from_config(block)
        print("is accepted")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
