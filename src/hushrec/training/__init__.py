"""Local training that methods share: samples, and training by model family.

`samples` draws the training samples of clients and trains item rows and vectors, `networks` MLPs
over item rows or features, `silo_network` networks of silos with many users, and `tensors` any loss
that autograd can differentiate. The loops are in `kernels`.
"""
