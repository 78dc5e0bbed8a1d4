"""Two callbacks: one to resume from, and one that keeps the best; the metric is on a plateau."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint


class Plateau(BoringModel):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.global_step > 40))


resume = TieredModelCheckpoint(memory_every_n_train_steps=10, s3_every_n_train_steps=50)
best = TieredModelCheckpoint(monitor="val_loss", save_top_k=3, filename="best-{epoch}-{step}")
trainer = Trainer(
    plugins=[AsyncCheckpointIO(TieredCheckpointIO(dirpath="s3://bucket/run", namespace="first"))],
    callbacks=[best, resume],
    val_check_interval=20,
    limit_val_batches=1,
    num_sanity_val_steps=0,
    max_steps=120,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Plateau(), ckpt_path="tiered:latest")
print("newest:", resume.best_model_path)
print("best:", sorted(best.best_k_models))
