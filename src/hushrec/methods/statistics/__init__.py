"""Methods whose model is a sum of statistics over clients: FedMix, FedNext, FedEASE."""
