"""What methods share when they train: samples, and the loops over each kind of model.

`samples` draws what a client trains on. `inner_product` and `row_network` train item rows under a
vector or a network; `feature_network` networks of features; `silo_network` networks of silos of
users; `tensors` anything that autograd can differentiate. The loops themselves are `kernels`.
"""
