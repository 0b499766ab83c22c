"""The experts of `fedmix`: each counts sums over clients, and scores items on a device."""
