"""Log a run to TensorBoard: ``python tensorboard_logger.py``; ``tensorboard --logdir logs``."""

from torch.utils.tensorboard import SummaryWriter

import hushrec


class TensorBoardLogger(hushrec.Callback):
    def __init__(self, folder="logs"):
        self.writer = SummaryWriter(folder)

    def on_round_end(self, record):
        if record.loss is not None:
            self.writer.add_scalar("loss", record.loss, record.round)
        for name, value in (record.valid or {}).get("full", {}).items():
            self.writer.add_scalar(f"valid/{name}", value, record.round)

    def on_end(self, result):
        self.writer.close()


if __name__ == "__main__":
    hushrec.train("demo", "fedmf", rounds=20, callbacks=[TensorBoardLogger()])
