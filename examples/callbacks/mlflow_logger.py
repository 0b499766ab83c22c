"""Log a run to MLflow: ``python mlflow_logger.py``, then ``mlflow ui``."""

import mlflow

import hushrec


class MLflowLogger(hushrec.Callback):
    def on_begin(self, experiment):
        mlflow.start_run(run_name=f"{experiment.method} on {experiment.data}")
        mlflow.log_params({"seed": experiment.seed, **experiment.options})

    def on_round_end(self, record):
        metrics = {"up_bytes": record.up_bytes, "seconds": record.seconds}
        if record.loss is not None:
            metrics["loss"] = record.loss
        if record.valid is not None:
            metrics["valid ndcg"] = record.valid["full"]["ndcg@10"]
        mlflow.log_metrics(metrics, step=record.round)

    def on_interrupt(self):
        mlflow.end_run("KILLED")

    def on_end(self, result):
        mlflow.log_metric("test ndcg", result.test["full"]["ndcg@10"])
        mlflow.end_run()


if __name__ == "__main__":
    hushrec.train("demo", "fedmf", rounds=20, callbacks=[MLflowLogger()])
