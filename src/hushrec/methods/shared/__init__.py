"""What several methods share: options, optimisers, denoising, dual personalization."""
